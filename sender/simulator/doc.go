// Package simulator plays the receiver: FCM's HTTP v1 and a relay that answer as
// they are told to, drop connections, accept and then lose the answer, and keep
// an exact log of what arrived when. Tests, demonstrations and the chaos tool
// judge this module from that log alone.
//
// It knows nothing of the packages that send: it reads the documented protocol
// by itself and refuses with 400 what does not keep to it, so that a mistake in
// the sender cannot hide behind shared code.
//
// # The log
//
// One arrival a message, also within a batch, as two lines of NDJSON: one when
// its request came in, a second with the same n and the answer. Times are
// nanoseconds of a clock that is the wall clock at the start and never jumps.
//
//   - t_ns is taken before the request's body is read.
//   - ended_ns is taken just before the answer is written or the connection is
//     dropped, so that it is never later than the end that the caller sees. Of
//     a caller that has gone by then only one thing is certain: that it was
//     there when its request had been read. That moment is the end then.
//   - answer is "200" for a message that was accepted, an error code for one
//     that was refused by itself, an HTTP status for one whose whole request
//     was refused, "reset", "hang" or "garbage" for one that got no answer
//     and was not accepted, and "validated" for one that was good but came with
//     FCM's validate_only, which the arrival notes whatever its answer.
//   - lost says that the message was accepted and that its sender cannot have
//     learnt it; repeat, that it was taken for one accepted before and dropped.
//
// An arrival is accepted if its answer is "200" and it is no repeat.
//
// With FCM a request is a message, so each outcome below befalls one message;
// errors have the bodies that FCM documents. An outcome that only an answer for
// many can have is an acceptance. School, notice, message, attempt, batch and
// fence are read from the data keys schoolbell_….
//
// # Scripts
//
// A token that begins with the name of an outcome and "-" gets that outcome
// each time; with a number after the name ("unavailable2-…") so many times, and
// is accepted from then on. The same names, in upper case, are the keys of
// Behaviour.Outcomes, which gives them a probability. Outcomes of a request
// (see the table in script.go) apply to the whole batch that holds such a token.
//
// Chance is drawn from the seed and the message or batch id, not from a shared
// stream, so that concurrency does not change what befalls a message.
package simulator
