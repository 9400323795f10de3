// Package school is the domain: schools, notices, recipients, their states and
// the outcomes that move them. It is pure: no clock, no I/O, standard library
// only.
package school
