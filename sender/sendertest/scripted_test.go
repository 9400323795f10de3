package sendertest

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"schoolbell/sender"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestScriptedKeepsTheContract(t *testing.T) {
	t.Parallel()
	Run(t, func(t *testing.T) Subject {
		s := NewScripted(0)
		s.Answer("gone-", 0, sender.Result{Class: sender.Gone, Code: "UNREGISTERED"})
		s.Answer("bad-", 0, sender.Result{Class: sender.Unavailable, Code: "INTERNAL", OutcomeUnknown: true})
		return Subject{Sender: s, Replies: map[string]Reply{
			"gone-": {Class: sender.Gone, Code: "UNREGISTERED"},
			"bad-":  {Class: sender.Unavailable, OutcomeUnknown: true},
		}}
	})
}

func TestAnswersAreUsedUp(t *testing.T) {
	t.Parallel()
	s := NewScripted(0)
	s.Answer("x", 2, sender.Result{Class: sender.Unavailable, Code: "UNAVAILABLE"})
	var got []sender.Class
	for range 3 {
		got = append(got, s.Send(t.Context(), Batch("b", 1, map[int]string{0: "x"}))[0].Class)
	}
	require.Equal(t, []sender.Class{sender.Unavailable, sender.Unavailable, sender.Accepted}, got)
}

func TestHoldAndDelay(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := NewScripted(time.Second)
		s.Hold()
		s.Delay(300 * time.Millisecond)
		done := make(chan []sender.Result)
		go func() { done <- s.Send(t.Context(), Batch("a", 1, nil)) }()
		calls, err := s.AwaitCalls(t.Context(), 1)
		require.NoError(t, err)
		require.Zero(t, calls[0].Ended)
		require.Equal(t, 1, s.Open())
		<-time.After(time.Minute)
		s.Release()
		require.Equal(t, sender.Accepted, (<-done)[0].Class)
		require.Equal(t, time.Minute+300*time.Millisecond, s.Calls()[0].Ended.Sub(calls[0].Began))
		require.Zero(t, s.Open())

		s.Hold()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		require.Equal(t, sender.Unknown, s.Send(ctx, Batch("b", 1, nil))[0].Class)
		require.Equal(t, sender.NotSent, s.Send(ctx, Batch("c", 1, nil))[0].Class)
		require.Len(t, s.Calls(), 2, "what was not sent is no call")
		_, err = s.AwaitCalls(ctx, 3)
		require.ErrorIs(t, err, context.DeadlineExceeded)
	})
}
