package store_test

import (
	"crypto/sha256"
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"schoolbell/school"
	"schoolbell/school/store"
)

// TestTopicIsResolvedByKey hands in notices to a large and to a tiny topic of a
// large registry, with plans made on empty tables, without statistics and with
// them: neither reads more than the devices that it is for, and a million others
// make no difference.
func TestTopicIsResolvedByKey(t *testing.T) {
	t.Parallel()
	url := migrated(t)
	admin := connect(t, url)
	for _, table := range []string{"devices", "device_topics", "push_cluster_tokens", "push_clusters", "schools"} {
		exec(t, admin, `ALTER TABLE `+table+` SET (autovacuum_enabled = false)`)
	}
	options := strings.ReplaceAll("-c session_preload_libraries=auto_explain -c auto_explain.log_min_duration=0 -c auto_explain.log_nested_statements=on"+
		" -c auto_explain.log_analyze=on -c auto_explain.log_timing=off -c auto_explain.log_format=json -c auto_explain.log_level=notice", " ", "%20")
	url += "&options=" + strings.ReplaceAll(options, "=", "%3D")
	var seen plans
	openSeen := func() *store.DB {
		db, err := store.Open(t.Context(), store.Config{URL: url, MaxConns: 3}.OnNotice(seen.notice))
		require.NoError(t, err)
		t.Cleanup(db.Close)
		return db
	}
	post := func(db *store.DB, topic string) int {
		t.Helper()
		n := notice("big")
		n.Topic = topic
		r, err := db.Accept(t.Context(), n, 0, nil)
		require.NoError(t, err)
		return r.Total
	}
	old := openSeen()
	require.Zero(t, post(old, "large"))

	const most = 20_000
	exec(t, admin, `INSERT INTO devices (school_id, token_sha, token) SELECT s, sha256(convert_to(i::text, 'UTF8')), i::text
		FROM generate_series(1, $1) i, unnest(ARRAY['big', 'other']) s`, most)
	exec(t, admin, `INSERT INTO device_topics (school_id, topic, token_sha) SELECT school_id, 'everyone', token_sha FROM devices`)
	exec(t, admin, `INSERT INTO device_topics (school_id, topic, token_sha) SELECT school_id, 'large', token_sha FROM devices WHERE token::integer % 20 = 0`)
	exec(t, admin, `INSERT INTO device_topics (school_id, topic, token_sha) SELECT school_id, 'tiny', token_sha FROM devices WHERE token::integer <= 3`)
	for _, c := range []struct {
		about    string
		analyzed bool
		db       *store.DB
	}{
		{"plans made on empty tables", false, old},
		{"fresh plans without statistics", false, openSeen()},
		{"fresh plans with statistics", true, openSeen()},
	} {
		if c.analyzed {
			exec(t, admin, `ANALYZE`)
		}
		seen.take(t)
		require.Equal(t, 3, post(c.db, "tiny"), c.about)
		requireByKey(t, seen.take(t), 10, c.about+", tiny")
		require.Equal(t, most/20, post(c.db, "large"), c.about)
		requireByKey(t, seen.take(t), most/20+10, c.about+", large")
	}
}

// byTopic are the ways in which a registry may be reached for a topic.
var byTopic = regexp.MustCompile(`PRIMARY KEY \(school_id=\? AND (topic=\? AND token_sha>\?|token_sha=\?)\)`)

// TestSQLiteTopicOfManyDevices is written in several steps, each of them by key.
func TestSQLiteTopicOfManyDevices(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "school.db")
	db := openFile(t, path)
	look := beside(t, path)
	const most = 51_000
	for from := 0; from < most; from += 500 {
		values := make([]string, 500)
		for i := range values {
			token := fmt.Sprint("token-", from+i)
			values[i] = fmt.Sprintf("('A', x'%x', '%s', 1, 1)", sha256.Sum256([]byte(token)), token)
		}
		execOn(t, look, `INSERT INTO devices (school_id, token_sha, token, registered_at, updated_at) VALUES `+strings.Join(values, ","))
	}
	execOn(t, look, `INSERT INTO device_topics (school_id, topic, token_sha) SELECT school_id, 'all', token_sha FROM devices`)

	var seen statements
	var r school.Receipt
	seen.of(db, func() {
		n := notice("A")
		n.Topic = "all"
		var err error
		r, err = db.Accept(t.Context(), n, 0, nil)
		require.NoError(t, err)
	})
	require.Equal(t, most, r.Total)
	require.Equal(t, [][]string{{fmt.Sprint(most), "1", fmt.Sprint(most)}},
		rowsOf(t, look, `SELECT count(DISTINCT token), min(seq), max(seq) FROM push_cluster_tokens WHERE cluster_id = ?`, r.ID))
	found := 0
	for _, query := range seen.list {
		if !strings.Contains(query, "device_topics") {
			continue
		}
		for _, step := range rowsOf(t, look, `EXPLAIN QUERY PLAN `+query, seen.args[query]...) {
			if strings.HasPrefix(step[3], "SEARCH t ") || strings.HasPrefix(step[3], "SEARCH d ") || strings.HasPrefix(step[3], "SCAN t") || strings.HasPrefix(step[3], "SCAN d") {
				require.Regexp(t, byTopic, step[3])
				found++
			}
			require.NotContains(t, step[3], "TEMP B-TREE")
		}
	}
	require.Equal(t, 2, found)
}
