// Package sender is the vocabulary of sending: a batch of messages, the call
// that hands it to a receiver, and one classified result a message.
//
// A sender classifies and nothing more. It never retries, never decides what
// becomes of a recipient, never touches a store, a lock or a quota. What can be
// known about a message after a call is one of nine classes (see Class), and
// the line that matters runs between what is certain (accepted, refused, never
// left this process) and what is not: DESIGN.md says where it runs and why.
//
// Invariants, kept by Guard for every implementation behind it:
//
//   - one result a message, in the order of the messages, whatever happens
//     inside (too few, too many, a panic, a call that overruns its deadline);
//   - nothing counts as accepted unless the receiver clearly said so;
//   - codes and details are safe to store and to log: no token, no text, no key.
//
// The package imports nothing else of this module.
package sender
