// Package logsender is the sender that sends nothing: it logs what it would
// send and accepts everything. It is the default of an installation that has
// not been told where to send, so that trying it out can reach nobody.
//
// Its lines say how much of which notice, never to whom and what: no token, no
// title, no body, no data.
package logsender

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"schoolbell/sender"
)

// longest bounds one call. There is nothing to wait for but the log itself.
const longest = time.Second

// Log is a sender.Sender that logs.
type Log struct {
	log *slog.Logger
}

var _ sender.Sender = (*Log)(nil)

// New returns a sender that writes to log under the given sender name.
func New(name string, log *slog.Logger) (*Log, error) {
	if log == nil {
		return nil, errors.New("log sender " + name + ": there is no logger to write to")
	}
	return &Log{log: log.With("sender", name)}, nil
}

// Longest is one second.
func (*Log) Longest() time.Duration { return longest }

// Send logs one line for each notice in the batch and accepts every message.
func (l *Log) Send(ctx context.Context, batch sender.Batch) []sender.Result {
	if ctx.Err() != nil {
		return sender.Fill(batch.Messages, sender.Result{Class: sender.NotSent, Code: sender.CodeCancelled})
	}
	for from := 0; from < len(batch.Messages); {
		to := from + 1
		for to < len(batch.Messages) && batch.Messages[to].Notice == batch.Messages[from].Notice {
			to++
		}
		l.log.LogAttrs(ctx, slog.LevelInfo, "would send",
			slog.String("event", "messages_logged"),
			slog.String("school", batch.School),
			slog.String("batch", batch.ID),
			slog.String("notice", batch.Messages[from].Notice),
			slog.Int("messages", to-from),
			slog.String("first", batch.Messages[from].ID),
			slog.String("last", batch.Messages[to-1].ID))
		from = to
	}
	return sender.Fill(batch.Messages, sender.Result{Class: sender.Accepted})
}
