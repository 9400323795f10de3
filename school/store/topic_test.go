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

// TestRegistryIsReachedByKey registers, records, flags and closes in a school of
// many devices, with plans made on empty tables and without statistics: each step
// reads the devices that it is about.
func TestRegistryIsReachedByKey(t *testing.T) {
	t.Parallel()
	url := migrated(t)
	admin := connect(t, url)
	for _, table := range []string{"devices", "device_topics", "device_flags", "device_brakes", "push_cluster_tokens", "push_clusters", "schools"} {
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
	const part = 100
	round := func(db *store.DB, about string, rows float64) {
		t.Helper()
		ctx := t.Context()
		seen.take(t)
		var list []school.NewDevice
		for r := range devices(part) {
			list = append(list, school.NewDevice{Token: r.Token, Topics: []string{"a", "b"}})
		}
		for range 2 {
			_, err := db.PutDevices(ctx, "big", list)
			require.NoError(t, err)
		}
		requireDevicesByKey(t, seen.take(t), rows, about+", put")
		for _, brake := range []bool{true, false} {
			accept(t, db, "big", part)
			term, err := db.OpenTerm(ctx, "big", "acq", "x")
			require.NoError(t, err)
			page, err := db.Page(ctx, term, part)
			require.NoError(t, err)
			c := claimOf(fmt.Sprint("gone-", term.Fence), page.Work)
			require.NoError(t, db.Claim(ctx, term, c))
			r := recordOf(t, term, c, func(int) school.Outcome { return school.Gone })
			r.Brake = brake
			seen.take(t)
			require.NoError(t, db.Record(ctx, r))
			requireDevicesByKey(t, seen.take(t), rows, fmt.Sprintf("%s, record, brake %t", about, brake))
			if brake {
				open, err := db.Brakes(ctx, school.BrakeFilter{Open: true, Limit: 1})
				require.NoError(t, err)
				require.Equal(t, part, open[0].Flagged)
				seen.take(t)
				_, err = db.CloseBrake(ctx, open[0].ID, school.BrakeCleared, "x")
				require.NoError(t, err)
				requireDevicesByKey(t, seen.take(t), rows, about+", close")
			}
		}
		require.NoError(t, db.DeleteDevice(ctx, "big", list[0].Token))
		requireDevicesByKey(t, seen.take(t), rows, about+", delete")
	}
	old := openSeen()
	round(old, "empty tables", 1e9)
	exec(t, admin, `INSERT INTO devices (school_id, token_sha, token) SELECT s, sha256(convert_to(i::text, 'UTF8')), i::text
		FROM generate_series(1, 20000) i, unnest(ARRAY['big', 'other']) s`)
	exec(t, admin, `INSERT INTO device_topics (school_id, topic, token_sha) SELECT school_id, 'all', token_sha FROM devices ON CONFLICT DO NOTHING`)
	exec(t, admin, `INSERT INTO schools (id) SELECT 's' || i FROM generate_series(1, 2000) i`)
	exec(t, admin, `INSERT INTO device_brakes (school_id, sender, batch_id, owner, unregistered, size, engaged_at, closed_at, closed_as)
		SELECT 's' || i, 'log', 'b' || i, '', 1, 1, now(), now(), 'cleared' FROM generate_series(1, 2000) i`)
	round(old, "plans made on empty tables", 12*part)
	round(openSeen(), "fresh plans without statistics", 12*part)
	exec(t, admin, `ANALYZE`)
	round(openSeen(), "fresh plans with statistics", 12*part)
}

// requireDevicesByKey is requireByKey for the tables of the registry alone: what a
// record reads of recipients is judged elsewhere.
func requireDevicesByKey(t *testing.T, list []explained, rows float64, about string) {
	t.Helper()
	require.NotEmpty(t, list, about)
	for _, e := range list {
		e.Plan.walk(func(n *planNode) {
			read := (n.Rows + n.Removed + n.Rechecks) * max(n.Loops, 1)
			if strings.HasPrefix(n.Relation, "device") && n.Type != "ModifyTable" && read > rows {
				t.Errorf("%s: %s of %s (%s) read %.0f rows in\n%s", about, n.Type, n.Relation, n.Index, read, e.Query)
			}
		})
	}
}
