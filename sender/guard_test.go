package sender

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// funcSender is a sender made of one function.
type funcSender struct {
	longest time.Duration
	send    func(ctx context.Context, b Batch) []Result
}

func (f funcSender) Send(ctx context.Context, b Batch) []Result { return f.send(ctx, b) }
func (f funcSender) Longest() time.Duration                     { return f.longest }

func batchOf(ids ...string) Batch {
	b := Batch{ID: "b1", School: "A"}
	c := &Content{Title: "secret title"}
	for _, id := range ids {
		b.Messages = append(b.Messages, Message{ID: id, Token: "token-of-" + id, Content: c, Attempt: 1})
	}
	return b
}

func guard(t *testing.T, log *slog.Logger, send func(ctx context.Context, b Batch) []Result) *Guard {
	t.Helper()
	g, err := NewGuard(GuardConfig{Name: "s", Grace: 100 * time.Millisecond},
		funcSender{longest: time.Second, send: send}, log)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, g.Close(context.Background())) })
	return g
}

func TestGuardCompletesResults(t *testing.T) {
	t.Parallel()
	ok := func(id string) Result { return Result{ID: id, Class: Accepted} }
	missing := func(id string) Result { return Result{ID: id, Class: Unknown, Code: CodeResultMissing} }
	for name, c := range map[string]struct {
		given, want []Result
	}{
		"as they should be": {[]Result{ok("1"), ok("2"), ok("3")}, []Result{ok("1"), ok("2"), ok("3")}},
		"another order":     {[]Result{ok("3"), {ID: "1", Class: Gone, Code: "UNREGISTERED"}, ok("2")}, []Result{{ID: "1", Class: Gone, Code: "UNREGISTERED"}, ok("2"), ok("3")}},
		"one missing":       {[]Result{ok("1"), ok("3")}, []Result{ok("1"), missing("2"), ok("3")}},
		"none at all":       {nil, []Result{missing("1"), missing("2"), missing("3")}},
		"one too many":      {[]Result{ok("1"), ok("2"), ok("3"), ok("4")}, []Result{ok("1"), ok("2"), ok("3")}},
		"a stranger":        {[]Result{ok("1"), ok("x"), ok("3")}, []Result{ok("1"), missing("2"), ok("3")}},
		"one twice": {[]Result{ok("1"), ok("1"), ok("2"), ok("3")},
			[]Result{{ID: "1", Class: Unknown, Code: CodeResultDuplicate}, ok("2"), ok("3")}},
		"one three times": {[]Result{ok("1"), ok("1"), ok("1")},
			[]Result{{ID: "1", Class: Unknown, Code: CodeResultDuplicate}, missing("2"), missing("3")}},
		"no class": {[]Result{{ID: "1"}, ok("2"), ok("3")},
			[]Result{{ID: "1", Class: Unknown, Code: CodeResultMalformed}, ok("2"), ok("3")}},
		"unsafe code, far wait, token in detail": {
			[]Result{{ID: "1", Class: Rejected, Code: "token-of-1", RetryAfter: 48 * time.Hour, Detail: "for token-of-1"}, {ID: "2", Class: Throttled, Code: "QUOTA_EXCEEDED", RetryAfter: -1, Detail: "quota"}, {ID: "3", Class: Accepted, Code: "X", OutcomeUnknown: true}},
			[]Result{{ID: "1", Class: Rejected, Code: CodeResultMalformed, RetryAfter: time.Hour}, {ID: "2", Class: Throttled, Code: "QUOTA_EXCEEDED", Detail: "quota"}, ok("3")}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := guard(t, nil, func(context.Context, Batch) []Result { return c.given })
			require.Equal(t, c.want, g.Send(t.Context(), batchOf("1", "2", "3")))
		})
	}
}

func TestGuardTurnsAPanicIntoUnknown(t *testing.T) {
	t.Parallel()
	for name, p := range map[string]func(b Batch){
		"value": func(b Batch) { panic("cannot send to " + b.Messages[0].Token + " " + b.Messages[0].Content.Title) },
		"error": func(b Batch) { panic(errors.New(b.Messages[0].Token)) },
		//lint:ignore SA5000 the panic is what is tested
		"runtime": func(b Batch) { var m map[string]int; m[b.Messages[0].Token] = 1 },
		"index":   func(b Batch) { _ = b.Messages[len(b.Messages)] },
		"type":    func(b Batch) { var x any = b.Messages[0].Token; _ = x.(int) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var out bytes.Buffer
			g := guard(t, slog.New(slog.NewJSONHandler(&out, nil)), func(_ context.Context, b Batch) []Result { p(b); return nil })

			got := g.Send(t.Context(), batchOf("1", "2"))

			require.Equal(t, []Result{{ID: "1", Class: Unknown, Code: CodePanic}, {ID: "2", Class: Unknown, Code: CodePanic}}, got)
			require.Equal(t, 1, bytes.Count(out.Bytes(), []byte("\n")), "one line: %s", out.String())
			require.Contains(t, out.String(), `"event":"send_panic"`)
			require.NotContains(t, out.String(), "token-of-")
			require.NotContains(t, out.String(), "secret title")
		})
	}
}

func TestGuardGivesUpACallThatOverrunsAndCloseJoinsIt(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		g, err := NewGuard(GuardConfig{Name: "s", Grace: 100 * time.Millisecond}, funcSender{
			longest: time.Second,
			send: func(_ context.Context, b Batch) []Result {
				<-release // deaf to its context
				return Fill(b.Messages, Result{Class: Accepted})
			},
		}, nil)
		require.NoError(t, err)

		begin := time.Now()
		got := g.Send(t.Context(), batchOf("1", "2"))
		require.Equal(t, 1100*time.Millisecond, time.Since(begin))
		require.Equal(t, []Result{{ID: "1", Class: Unknown, Code: CodeOverrun}, {ID: "2", Class: Unknown, Code: CodeOverrun}}, got)

		short, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		require.ErrorIs(t, g.Close(short), context.DeadlineExceeded, "it still runs")

		closed := make(chan error)
		go func() { closed <- g.Close(context.Background()) }()
		synctest.Wait()
		close(release)
		require.NoError(t, <-closed)
		require.Equal(t, []Result{{ID: "3", Class: NotSent, Code: CodeClosed}}, g.Send(t.Context(), batchOf("3")))
	})
}

func TestGuardTakesResultsWithinTheGrace(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g := guard(t, nil, func(ctx context.Context, b Batch) []Result {
			<-ctx.Done()
			<-time.After(99 * time.Millisecond)
			return Fill(b.Messages, Result{Class: Accepted})
		})
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		begin := time.Now()
		require.Equal(t, []Result{{ID: "1", Class: Accepted}}, g.Send(ctx, batchOf("1")))
		require.Equal(t, 399*time.Millisecond, time.Since(begin), "the earlier of the two deadlines counts")
	})
}

func TestGuardDoesNotCallWhenTheContextHasEnded(t *testing.T) {
	t.Parallel()
	g := guard(t, nil, func(context.Context, Batch) []Result { panic("must not be called") })
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.Equal(t, []Result{{ID: "1", Class: NotSent, Code: CodeCancelled}}, g.Send(ctx, batchOf("1")))
	require.Empty(t, g.Send(t.Context(), Batch{}))
}
