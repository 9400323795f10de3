package store_test

import (
	"fmt"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/school/store"
)

// used is what this process, the database with it, has used of the processors.
func used(b *testing.B) time.Duration {
	b.Helper()
	var r syscall.Rusage
	require.NoError(b, syscall.Getrusage(syscall.RUSAGE_SELF, &r))
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

func benchFile(b *testing.B, relaxed bool) *store.SQLite {
	b.Helper()
	db, err := store.OpenSQLite(b.Context(), store.SQLiteConfig{Path: filepath.Join(b.TempDir(), "school.db"), Relaxed: relaxed})
	require.NoError(b, err)
	b.Cleanup(db.Close)
	return db
}

// BenchmarkSQLiteLifeCycle is what BenchmarkLifeCycle is.
func BenchmarkSQLiteLifeCycle(b *testing.B) {
	for _, c := range []struct {
		schools int
		relaxed bool
	}{{1, false}, {4, false}, {4, true}} {
		b.Run(fmt.Sprintf("schools=%d/relaxed=%t", c.schools, c.relaxed), func(b *testing.B) {
			db := benchFile(b, c.relaxed)
			each := (b.N + c.schools*1000 - 1) / (c.schools * 1000) // notices
			b.ResetTimer()
			before := used(b)
			var wg sync.WaitGroup
			for s := range c.schools {
				wg.Go(func() { lifeCycle(b, db, fmt.Sprint("school-", s), each) })
			}
			wg.Wait()
			b.StopTimer()
			n := float64(each * c.schools * 1000)
			b.ReportMetric(n/b.Elapsed().Seconds(), "recipients/s")
			b.ReportMetric((used(b)-before).Seconds()*1e6/n, "cpu-µs/recipient")
		})
	}
}

// BenchmarkSQLiteAccept stores notices of different sizes, and tells how long
// another change had to wait meanwhile.
func BenchmarkSQLiteAccept(b *testing.B) {
	for _, size := range []int{1, 100, 1000, 1_000_000} {
		b.Run(fmt.Sprintf("recipients=%d", size), func(b *testing.B) {
			db := benchFile(b, false)
			accept(b, db, "B", 1)
			var longest time.Duration
			stop := make(chan struct{})
			var other sync.WaitGroup
			other.Go(func() {
				for tick := time.NewTicker(50 * time.Millisecond); ; {
					select {
					case <-stop:
						tick.Stop()
						return
					case <-tick.C:
					}
					began := time.Now()
					if err := db.Resume(b.Context(), "B"); err != nil {
						b.Error(err)
					}
					longest = max(longest, time.Since(began))
				}
			})
			before := used(b)
			for b.Loop() {
				accept(b, db, "A", size)
			}
			close(stop)
			other.Wait()
			var r syscall.Rusage
			require.NoError(b, syscall.Getrusage(syscall.RUSAGE_SELF, &r))
			b.ReportMetric(float64(size*b.N)/b.Elapsed().Seconds(), "recipients/s")
			b.ReportMetric((used(b)-before).Seconds()*1e6/float64(size*b.N), "cpu-µs/recipient")
			b.ReportMetric(float64(r.Maxrss)/1024, "peakRssMiB")
			b.ReportMetric(longest.Seconds()*1000, "longestWait-ms")
		})
	}
}
