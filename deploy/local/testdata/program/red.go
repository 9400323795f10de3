//go:build red

package main

const colour = "red"
