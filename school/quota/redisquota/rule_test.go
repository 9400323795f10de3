package redisquota

import (
	"testing"

	"schoolbell/school/quota/quotatest"
)

func TestCases(t *testing.T) {
	t.Parallel()
	srv := startServer(t)
	quotatest.RunCases(t, "../testdata/rule.json", func(tb testing.TB) quotatest.Subject { return srv.subject(tb) })
}
