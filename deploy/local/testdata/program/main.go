// Program is what the tests of package local start, kill and pause.
package main

import (
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"
)

func main() {
	fmt.Fprintln(os.Stderr, "colour:", colour)
	switch os.Args[1] {
	case "exit":
		code, _ := strconv.Atoi(os.Args[2])
		os.Exit(code)
	case "print":
		fmt.Println(os.Getenv(os.Args[2]))
	case "serve":
		// Ready once the file exists; ends well on SIGTERM.
		stop := make(chan os.Signal, 1)
		signal.Notify(stop, syscall.SIGTERM)
		if err := os.WriteFile(os.Args[2], nil, 0o600); err != nil {
			os.Exit(1)
		}
		<-stop
		os.Exit(7)
	case "deaf":
		signal.Ignore(syscall.SIGTERM)
		fmt.Println("deaf")
		time.Sleep(time.Hour)
	}
}
