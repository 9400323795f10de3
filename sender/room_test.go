package sender

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestRoomIsFirstComeFirstServed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		room, err := NewRoom(300)
		require.NoError(t, err)
		leave, err := room.Enter(t.Context(), 200)
		require.NoError(t, err)

		order := make(chan int, 2)
		for _, n := range []int{200, 100} { // the small one would fit at once
			go func() {
				out, err := room.Enter(context.Background(), n)
				if err == nil {
					order <- n
					defer out()
				}
			}()
			synctest.Wait()
		}
		require.Empty(t, order, "the small one must not overtake the large one")
		_, ok := room.TryEnter(1)
		require.False(t, ok, "nor may one that does not wait")

		leave()
		leave() // leaving twice gives nothing back twice
		synctest.Wait()
		require.ElementsMatch(t, []int{200, 100}, []int{<-order, <-order}, "both fit now")
		synctest.Wait()
		require.Equal(t, 0, room.InUse())
	})
}

func TestRoomRefusesWhatNeverFits(t *testing.T) {
	t.Parallel()
	_, err := NewRoom(0)
	require.Error(t, err)
	room, err := NewRoom(10)
	require.NoError(t, err)
	for _, n := range []int{-1, 0, 11} {
		_, err = room.Enter(t.Context(), n)
		require.Error(t, err, n)
		_, ok := room.TryEnter(n)
		require.False(t, ok, n)
	}
	require.Equal(t, 10, room.Size())
}

func TestRoomStopsWaitingWithTheContext(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		room, err := NewRoom(1)
		require.NoError(t, err)
		leave, err := room.Enter(t.Context(), 1)
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err = room.Enter(ctx, 1)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, 1, room.InUse())
		leave()
		_, ok := room.TryEnter(1)
		require.True(t, ok)
	})
}
