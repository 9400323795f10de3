// Package settings is what one replica is told: every setting with its name,
// its default, its bounds and how it relates to the others.
//
// [Load] puts three layers over the defaults, each stronger than the one
// before: a YAML file, the SCHOOLBELL_ variables of the environment, the flags
// of the command line. It is pure: whoever calls it gives the environment, the
// flags and a way to read a file.
//
// It does not open, dial or look anything up: whether a database answers or a
// credentials file is good is for the parts that use them.
//
// Invariants: what Load returns is valid as a whole (an unknown name, a value
// out of bounds and two settings that contradict each other are all refused,
// with the name, the place and the fix); a secret never appears in an error,
// in a log line, or in what [Settings.Print] writes.
package settings
