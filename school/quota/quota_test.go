package quota_test

import (
	"testing"

	"schoolbell/school/quota/quotatest"
)

func TestCases(t *testing.T) {
	t.Parallel()
	quotatest.RunCases(t, "testdata/rule.json", fresh)
}
