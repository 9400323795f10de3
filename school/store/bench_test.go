package store_test

import (
	"fmt"
	"runtime"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"schoolbell/deploy/local"
	"schoolbell/deploy/local/localtest"
	"schoolbell/school"
	"schoolbell/school/store"
)

// durable returns the URL of a database on a server that keeps its promises,
// since what durability costs is most of what is measured.
func durable(b *testing.B) string {
	server := localtest.OwnPostgres(b, local.PostgresConfig{Settings: map[string]string{
		"shared_buffers": "1GB", "max_wal_size": "8GB", "checkpoint_timeout": "15min", "wal_compression": "lz4",
	}})
	url, err := server.CreateDatabase(b.Context(), "bench")
	require.NoError(b, err)
	_, err = store.Migrate(b.Context(), url)
	require.NoError(b, err)
	return url
}

// BenchmarkLifeCycle is insert, page, claim and record of recipients, 2 in 100
// failing, by as many schools at once as is said; each school's notices have
// 1,000 recipients and its batches 200.
func BenchmarkLifeCycle(b *testing.B) {
	for _, schools := range []int{1, 2, 4} {
		b.Run(fmt.Sprintf("schools=%d", schools), func(b *testing.B) {
			url := durable(b)
			db, err := store.Open(b.Context(), store.Config{URL: url})
			require.NoError(b, err)
			defer db.Close()
			conn := connect(b, url)
			b.ResetTimer()
			from := query(b, conn, `SELECT pg_current_wal_insert_lsn()`)[0][0]
			var wg sync.WaitGroup
			each := (b.N + schools*1000 - 1) / (schools * 1000) // notices
			for s := range schools {
				wg.Go(func() { lifeCycle(b, db, fmt.Sprint("school-", s), each) })
			}
			wg.Wait()
			b.StopTimer()
			n := float64(each * schools * 1000)
			var wal float64
			require.NoError(b, conn.QueryRow(b.Context(), `SELECT (pg_current_wal_insert_lsn() - $1::pg_lsn)::float8`, from).Scan(&wal))
			b.ReportMetric(n/b.Elapsed().Seconds(), "recipients/s")
			b.ReportMetric(wal/n, "walB/recipient")
		})
	}
}

func lifeCycle(b *testing.B, db *store.DB, id string, notices int) {
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
	url := durable(b)
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
