package store_test

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"schoolbell/deploy/local"
	"schoolbell/deploy/local/localtest"
	"schoolbell/school"
	"schoolbell/school/store"
	"schoolbell/school/store/storetest"
)

// durable returns the URL of a database on a server that keeps its promises,
// since what durability costs is most of what is measured.
func durable(b *testing.B) (string, *local.Postgres) {
	server := localtest.OwnPostgres(b, local.PostgresConfig{Settings: map[string]string{
		"shared_buffers": "1GB", "max_wal_size": "8GB", "checkpoint_timeout": "15min", "wal_compression": "lz4",
	}})
	url, err := server.CreateDatabase(b.Context(), "bench")
	require.NoError(b, err)
	_, err = store.Migrate(b.Context(), url)
	require.NoError(b, err)
	return url, server
}

// cpu is what a server's processes and this one have used, in seconds: on a
// machine that others use as well it says more than the time that passed.
func cpu(b *testing.B, server *local.Postgres) (postgres, client float64) {
	b.Helper()
	const ticks = 100
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	require.NoError(b, err)
	for _, path := range stats {
		text, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		_, after, _ := strings.Cut(string(text), ") ")
		f := strings.Fields(after) // state, ppid, …, utime 11, stime 12, cutime 13, cstime 14
		sum := func(fields ...int) (seconds float64) {
			for _, i := range fields {
				n, err := strconv.ParseFloat(f[i], 64)
				require.NoError(b, err)
				seconds += n / ticks
			}
			return seconds
		}
		switch {
		case path == fmt.Sprintf("/proc/%d/stat", server.PID()):
			postgres += sum(11, 12, 13, 14)
		case f[1] == strconv.Itoa(server.PID()):
			postgres += sum(11, 12)
		case path == fmt.Sprintf("/proc/%d/stat", os.Getpid()):
			client += sum(11, 12)
		}
	}
	return postgres, client
}

// BenchmarkLifeCycle is insert, page, claim and record of recipients, 2 in 100
// failing, by as many schools at once as is said; each school's notices have
// 1,000 recipients and its batches 200.
func BenchmarkLifeCycle(b *testing.B) {
	for _, schools := range []int{1, 2, 4} {
		b.Run(fmt.Sprintf("schools=%d", schools), func(b *testing.B) {
			url, server := durable(b)
			db, err := store.Open(b.Context(), store.Config{URL: url})
			require.NoError(b, err)
			defer db.Close()
			conn := connect(b, url)
			b.ResetTimer()
			pg, client := cpu(b, server)
			from := query(b, conn, `SELECT pg_current_wal_insert_lsn()`)[0][0]
			var wg sync.WaitGroup
			each := (b.N + schools*1000 - 1) / (schools * 1000) // notices
			for s := range schools {
				wg.Go(func() { lifeCycle(b, db, fmt.Sprint("school-", s), each) })
			}
			wg.Wait()
			b.StopTimer()
			n := float64(each * schools * 1000)
			pgAfter, clientAfter := cpu(b, server)
			b.ReportMetric((pgAfter-pg)/n*1e6, "postgres-µs/recipient")
			b.ReportMetric((clientAfter-client)/n*1e6, "client-µs/recipient")
			var wal float64
			require.NoError(b, conn.QueryRow(b.Context(), `SELECT (pg_current_wal_insert_lsn() - $1::pg_lsn)::float8`, from).Scan(&wal))
			b.ReportMetric(n/b.Elapsed().Seconds(), "recipients/s")
			b.ReportMetric(wal/n, "walB/recipient")
		})
	}
}

func lifeCycle(b *testing.B, db storetest.Store, id string, notices int) {
	for range notices {
		accept(b, db, id, 1000)
	}
	term, err := db.OpenTerm(b.Context(), id, "acq", "x")
	require.NoError(b, err)
	for i := 0; ; i++ {
		page, err := db.Page(b.Context(), term, 1000)
		require.NoError(b, err)
		if len(page.Work) == 0 {
			return
		}
		for j := 0; j < len(page.Work); j += 200 {
			sendBatch(b, b.Context(), db, term, fmt.Sprint(id, "-", i, "-", j), page.Work[j:min(j+200, len(page.Work))], func(i int) school.Outcome {
				if i%50 == 0 {
					return school.Gone
				}
				return school.Accepted
			})
		}
	}
}

// BenchmarkAccept stores notices of different sizes.
func BenchmarkAccept(b *testing.B) {
	url, _ := durable(b)
	db, err := store.Open(b.Context(), store.Config{URL: url})
	require.NoError(b, err)
	defer db.Close()
	for _, size := range []int{1, 100, 1000, 1_000_000} {
		b.Run(fmt.Sprintf("recipients=%d", size), func(b *testing.B) {
			var before, after runtime.MemStats
			for b.Loop() {
				runtime.ReadMemStats(&before)
				accept(b, db, "A", size)
				runtime.ReadMemStats(&after)
			}
			b.ReportMetric(float64(size*b.N)/b.Elapsed().Seconds(), "recipients/s")
			b.ReportMetric(float64(after.Sys)/(1<<20), "sysMiB")
		})
	}
}
