package store_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"schoolbell/deploy/local/localtest"
	"schoolbell/school"
	"schoolbell/school/store"
)

// enqueueSQL is how an application calls the function, all arguments given.
const enqueueSQL = `SELECT schoolbell_enqueue($1, $2, $3, $4, $5, $6)`

// enqueuing is what an application gives; zero fields are left NULL.
type enqueuing struct {
	School, Title, Body string
	Data                any
	Tokens              []string
	Options             map[string]any
}

func simple(schoolID string, tokens ...string) enqueuing {
	return enqueuing{School: schoolID, Title: "Title", Body: "Body", Tokens: tokens}
}

// asking is a connection or a transaction of an application.
type asking interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

func enqueue(ctx context.Context, conn asking, e enqueuing) (id int64, err error) {
	asJSON := func(v any) *string {
		b, err := json.Marshal(v)
		if err != nil {
			panic(err)
		}
		if s := string(b); s != "null" {
			return &s
		}
		return nil
	}
	var text string
	if err := conn.QueryRow(ctx, enqueueSQL, e.School, e.Title, e.Body, asJSON(e.Data), e.Tokens, asJSON(e.Options)).Scan(&text); err != nil {
		return 0, err
	}
	return school.ParseNoticeID(text)
}

// pgError is the server's error, which must be one.
func pgError(t *testing.T, err error, about string) *pgconn.PgError {
	t.Helper()
	pg, ok := errors.AsType[*pgconn.PgError](err)
	require.True(t, ok, "%s: %v", about, err)
	return pg
}

// TestEnqueueStoresWhatAcceptStores compares every column, but for ids, times and
// the hash of the request.
func TestEnqueueStoresWhatAcceptStores(t *testing.T) {
	t.Parallel()
	url := migrated(t)
	db, conn := open(t, url), connect(t, url)
	off, badge, when := false, 7, time.Date(2030, 1, 2, 8, 0, 0, 123456000, time.FixedZone("KST", 9*60*60))
	list := []school.NewRecipient{
		{Token: "one", Ref: "member-17", Enabled: &off, Badge: &badge, Data: map[string]string{"k": "own"}},
		{Token: "two"}, {Token: "one"}, {Token: "three", Ref: "학생-3"}, {Token: "two", Ref: "again"},
	}
	n := &school.Notice{
		School: "accepted", Priority: school.Low, Delivery: school.AtMostOnce, ScheduledAt: when, ExpiresAt: when.Add(time.Hour),
		Content:        school.Content{Title: "가정통신문", Body: "Body", Data: map[string]string{"k": "v"}, Image: "https://x.example/i.png", Link: "https://x.example/"},
		IdempotencyKey: "key", Fallback: "학교 소식",
	}
	a, err := db.Accept(t.Context(), n, len(list), func(yield func(school.NewRecipient, error) bool) {
		for _, r := range list {
			if !yield(r, nil) {
				return
			}
		}
	})
	require.NoError(t, err)
	id, err := enqueue(t.Context(), conn, enqueuing{School: "enqueued", Title: "가정통신문", Body: "Body", Data: map[string]any{"k": "v"}, Options: map[string]any{
		"scheduled_at": when.Format(time.RFC3339Nano), "expires_at": when.Add(time.Hour).Format(time.RFC3339Nano), "delivery": "at_most_once",
		"priority": "low", "image": "https://x.example/i.png", "link": "https://x.example/", "idempotency_key": "key", "topic": nil, "fallback": map[string]any{"sms": "학교 소식"},
		"recipients": []any{
			map[string]any{"token": "one", "ref": "member-17", "enabled": false, "badge": 7, "data": map[string]any{"k": "own"}},
			map[string]any{"token": "two", "ref": nil}, map[string]any{"token": "one", "data": map[string]any{}},
			map[string]any{"token": "three", "ref": "학생-3"}, map[string]any{"token": "two", "ref": "again"},
		},
	}})
	require.NoError(t, err)
	for _, sql := range []string{
		`SELECT (to_jsonb(c) - ARRAY['id', 'school_id', 'created_at', 'request_hash'])::text FROM push_clusters c WHERE id = $1`,
		`SELECT string_agg((to_jsonb(t) - ARRAY['cluster_id', 'school_id', 'processed_at'])::text || (processed_at IS NULL)::text, E'\n' ORDER BY seq)
			FROM push_cluster_tokens t WHERE cluster_id = $1`,
		`SELECT (to_jsonb(s) - ARRAY['id', 'created_at'])::text || (to_jsonb(t) - ARRAY['school_id'])::text
			FROM schools s JOIN school_terms t ON t.school_id = s.id WHERE s.id = (SELECT school_id FROM push_clusters WHERE id = $1)`,
	} {
		require.Equal(t, query(t, conn, sql, a.ID), query(t, conn, sql, id))
	}
	require.Equal(t, [][]string{{"0"}}, query(t, conn, `SELECT count(*) FROM school_arrivals`))

	// Plain tokens, and many: seq is the place in the list.
	id, err = enqueue(t.Context(), conn, simple("enqueued", "a", "b", "a"))
	require.NoError(t, err)
	require.Equal(t, [][]string{{"1", "a", "PENDING", ""}, {"2", "b", "PENDING", ""}, {"3", "a", "SKIPPED", "DUPLICATE"}},
		query(t, conn, `SELECT seq, token, job_status, reason FROM push_cluster_tokens WHERE cluster_id = $1 ORDER BY seq`, id))
	p := progress(t, db, id)
	require.Equal(t, school.Counts{Total: 3, Waiting: 2, Skipped: school.Skips{Duplicate: 1}}, p.Counts)
	require.Less(t, school.NewNoticeID(p.CreatedAt.Add(-time.Minute), 0), id, "ids show their time")
	require.Greater(t, school.NewNoticeID(p.CreatedAt.Add(time.Minute), 0), id)
}

// TestEnqueueRefusesWhatTheAPIRefuses gives the function and the domain the same
// input: both take it, or both refuse it with the same words.
func TestEnqueueRefusesWhatTheAPIRefuses(t *testing.T) {
	t.Parallel()
	conn := connect(t, migrated(t))
	const added = 271 // what a sender adds; the sizes below fail where it is another
	text := func(n int) string { return strings.Repeat("x", n) }
	type tried struct {
		about string
		n     school.Notice
		r     *school.NewRecipient
	}
	var cases []tried
	notice := func(about string, change func(n *school.Notice)) {
		n := school.Notice{School: "A", Content: school.Content{Title: "Title", Body: "Body"}, Priority: school.Normal, Delivery: school.AtLeastOnce}
		change(&n)
		cases = append(cases, tried{about: about, n: n})
	}
	recipient := func(about string, r school.NewRecipient) {
		n := school.Notice{School: "A", Content: school.Content{Title: "Title", Body: "Body", Data: map[string]string{"k": "value"}}, Priority: school.Normal, Delivery: school.AtLeastOnce}
		cases = append(cases, tried{about: about, n: n, r: &r})
	}
	for _, id := range []string{"", "A", text(64), text(65), "A}", "A\n", "학교", "a.b_c-D9", " A"} {
		notice("school "+id, func(n *school.Notice) { n.School = id })
	}
	for _, title := range []string{"", " \t", "\u3000\u00a0\u2003\u0085", "x", " x ", "\u200b", "📚"} {
		notice("title "+title, func(n *school.Notice) { n.Content.Title = title })
	}
	for _, key := range []string{"", "from", "message_type", "google.c", "googled", "gcm", "gcm.n", "schoolbell_x", "schoolbell", "From", "k", "한글", text(70), "a\nb", "with space"} {
		notice("data key "+key, func(n *school.Notice) { n.Content.Data = map[string]string{key: "v"} })
	}
	notice("two wrong keys", func(n *school.Notice) { n.Content.Data = map[string]string{"gcm": "v", "from": "v", "A": "v"} })
	for _, size := range []int{4096 - added - 4, 4096 - added - 3} {
		notice("title's size", func(n *school.Notice) { n.Content.Title = text(size) })
	}
	for _, size := range []int{4096 - added - 5, 4096 - added - 4} {
		notice("body's size", func(n *school.Notice) { n.Content.Body = text(size) })
		notice("data's size", func(n *school.Notice) { n.Content.Body, n.Content.Data = "", map[string]string{"key": text(size - 3)} })
	}
	for _, sms := range []string{strings.Repeat("가", 2000), strings.Repeat("가", 2001)} {
		notice("sms", func(n *school.Notice) { n.Fallback = sms })
	}
	for _, size := range []int{4096 - added - 5 - 9 - 100, 4096 - added - 5 - 9 - 100 - 4, 4096 - added - 5 - 9 - 100 - 3} {
		link := "https://x.example/" + text(82)
		notice("with an image", func(n *school.Notice) { n.Content.Body, n.Content.Image = text(size+9), link })
		notice("with a link", func(n *school.Notice) { n.Content.Body, n.Content.Link = text(size+9), link })
		notice("with a link of its own", func(n *school.Notice) {
			n.Content.Body, n.Content.Link, n.Content.Data = text(size), link, map[string]string{"link": text(105)}
		})
	}
	notice("a large link", func(n *school.Notice) {
		n.Content.Body, n.Content.Link, n.Content.Image = text(1500), "https://x.example/"+text(2000), "https://x.example/"+text(2000)
	})
	notice("size in bytes", func(n *school.Notice) { n.Content.Body = strings.Repeat("가", 1300) })
	notice("all the same", func(n *school.Notice) {
		n.Content = school.Content{Title: text(2000), Body: text(2000), Data: map[string]string{"k": text(1999)}}
	})
	for _, link := range []string{"https://x.example/a?b#c", "http://x", "ftp://x", "/path", "https://", "https:///x", "https://x y/", "https://x/%zz", "https://x/%41",
		"HTTPS://X", "https://x:80/", "https://x:port/", "https://u:p@x/", "https://[::1]:8/", "https://학교.example/공지", "https://x/a b", "https://x/\n",
		"mailto:a@b", "https://x/" + text(2038), "https://x/" + text(2039), "//x", "https:x", "https://x?q=%zz"} {
		notice("link "+link, func(n *school.Notice) { n.Content.Link = link })
		notice("image "+link, func(n *school.Notice) { n.Content.Image = link })
	}
	for _, p := range []school.Priority{school.Urgent, school.Low, "high"} {
		notice("priority "+string(p), func(n *school.Notice) { n.Priority = p })
	}
	for _, d := range []school.Delivery{school.AtMostOnce, "sometimes"} {
		notice("delivery "+string(d), func(n *school.Notice) { n.Delivery = d })
	}
	at := time.Date(2031, 1, 1, 0, 0, 0, 0, time.UTC)
	for _, after := range []time.Duration{-time.Second, 0, time.Second} {
		notice("expires "+after.String(), func(n *school.Notice) { n.ScheduledAt, n.ExpiresAt = at, at.Add(after) })
	}
	for _, key := range []string{"k", text(255), text(256), "한글 with space", "tab\t", "nbsp\u00a0", "zero\u200bwidth", "\u3000", "bom\ufeff"} {
		notice("key "+key, func(n *school.Notice) { n.IdempotencyKey = key })
	}
	for _, token := range []string{"", text(4096), text(4097), "tab\t", "del\x7f", "c1\u0085", "한글", "with space", `q"\{},`} {
		recipient("token "+token, school.NewRecipient{Token: token})
	}
	for _, ref := range []string{strings.Repeat("가", 255), strings.Repeat("가", 256), "line\nend"} {
		recipient("ref "+ref, school.NewRecipient{Token: "t", Ref: ref})
	}
	for _, badge := range []int{-1, 0, 1<<31 - 1, 1 << 31, 1 << 40} {
		recipient(fmt.Sprint("badge ", badge), school.NewRecipient{Token: "t", Badge: &badge})
	}
	for _, data := range []map[string]string{{}, {"from": "v"}, {"": "v"}, {"own": "v"},
		{"link": text(4096 - added - 9 - 5 - 4)}, {"link": text(4096 - added - 9 - 6 - 3)},
		{"k": text(4096 - added - 9 - 1)}, {"k": text(4096 - added - 9)}, {"l": text(4096 - added - 9 - 1 - 6)}, {"l": text(4096 - added - 9 - 6)}} {
		recipient(fmt.Sprint("data ", data), school.NewRecipient{Token: "t", Data: data})
	}

	taken, refused := 0, 0
	for i, c := range cases {
		if len(c.about) > 60 {
			c.about = c.about[:60]
		}
		want := school.ValidateNotice(&c.n, time.Time{})
		if c.r == nil {
			c.r = &school.NewRecipient{Token: "t"}
		} else if want == nil {
			want = school.ValidateRecipient(1, c.r, &c.n.Content)
		}
		one := map[string]any{"token": c.r.Token, "ref": c.r.Ref, "badge": c.r.Badge, "data": c.r.Data}
		e := enqueuing{School: c.n.School, Title: c.n.Content.Title, Body: c.n.Content.Body, Data: c.n.Content.Data, Options: map[string]any{
			"delivery": c.n.Delivery, "priority": c.n.Priority, "image": c.n.Content.Image, "link": c.n.Content.Link,
			"recipients": []any{map[string]any{"token": "first"}, one}}}
		for name, moment := range map[string]time.Time{"scheduled_at": c.n.ScheduledAt, "expires_at": c.n.ExpiresAt} {
			if !moment.IsZero() {
				e.Options[name] = moment
			}
		}
		if c.n.Fallback != "" {
			e.Options["fallback"] = map[string]any{"sms": c.n.Fallback}
		}
		if c.n.IdempotencyKey != "" {
			e.Options["idempotency_key"] = c.n.IdempotencyKey
		}
		_, err := enqueue(t.Context(), conn, e)
		if want == nil {
			taken++
			require.NoError(t, err, "case %d: %s", i, c.about)
			continue
		}
		refused++
		pg := pgError(t, err, c.about)
		require.Equal(t, "22023", pg.Code, c.about)
		field, ok := errors.AsType[*school.FieldError](want)
		require.True(t, ok)
		name := strings.Replace(field.Field, "Idempotency-Key", "idempotency_key", 1)
		require.Equal(t, name, pg.ColumnName, c.about)
		require.Equal(t, name+": "+field.Message, pg.Message, c.about)
		require.NotEmpty(t, pg.Hint, c.about)
	}
	require.Greater(t, taken, 30)
	require.Greater(t, refused, 50)
}

// TestEnqueueRefusesInWords: what only the function can be given.
func TestEnqueueRefusesInWords(t *testing.T) {
	t.Parallel()
	conn := connect(t, migrated(t))
	for _, c := range []struct {
		args  string
		field string
		want  string
	}{
		{`'A', 'T', 'B', NULL, NULL`, "tokens", "is required; or name a topic"},
		{`'A', 'T', 'B', NULL, '{}'`, "tokens", "must name at least one device"},
		{`'A', 'T', 'B', NULL, NULL, '{"recipients":[]}'`, "recipients", "must name at least one device"},
		{`'A', 'T', 'B', NULL, '{a}', '{"recipients":[{"token":"t"}]}'`, "tokens", "cannot go with recipients; give one of the two"},
		{`'A', 'T', 'B', NULL, NULL, '{"recipients":"t"}'`, "recipients", `must be an array of objects, [{"token":"…"}]`},
		{`'A', 'T', 'B', NULL, NULL, '{"recipients":["t"]}'`, "recipients[0]", `must be an object, {"token":"…"}`},
		{`'A', 'T', 'B', NULL, NULL, '{"recipients":[{"token":7}]}'`, "recipients[0].token", "must be a string"},
		{`'A', 'T', 'B', NULL, NULL, '{"recipients":[{"tokn":"t"}]}'`, "recipients[0].tokn", "is not a field of a recipient; it has token, ref, enabled, badge, data"},
		{`'A', 'T', 'B', NULL, NULL, '{"recipients":[{"token":"t","enabled":"no"}]}'`, "recipients[0].enabled", "must be true or false"},
		{`'A', 'T', 'B', NULL, NULL, '{"recipients":[{"token":"t","ref":3}]}'`, "recipients[0].ref", "must be a string"},
		{`'A', 'T', 'B', NULL, NULL, '{"recipients":[{"token":"t","badge":1.5}]}'`, "recipients[0].badge", "must be a whole number"},
		{`'A', 'T', 'B', NULL, NULL, '{"recipients":[{"token":"t","badge":"1"}]}'`, "recipients[0].badge", "must be a whole number"},
		{`'A', 'T', 'B', NULL, NULL, '{"recipients":[{"token":"t","data":{"a":1}}]}'`, "recipients[0].data.a", "must be a string"},
		{`'A', 'T', 'B', NULL, ARRAY['a', NULL]`, "tokens[2]", "is required"},
		{`'A', 'T', 'B', NULL, ARRAY[['a', 'b'], ['c', 'd']]`, "tokens", "must have one dimension"},
		{`'A', 'T', 'B', NULL, array_fill('t'::text, ARRAY[1000001])`, "tokens", "at most 1000000"},
		{`'A', NULL, 'B', NULL, '{t}'`, "title", "is required"},
		{`NULL, 'T', 'B', NULL, '{t}'`, "school", "is required"},
		{`'A', 'T', 'B', '{"a":1}', '{t}'`, "data.a", "must be a string"},
		{`'A', 'T', 'B', '{"a":null}', '{t}'`, "data.a", "must be a string"},
		{`'A', 'T', 'B', '[]', '{t}'`, "data", "must be an object of strings"},
		{`'A', 'T', 'B', NULL, '{t}', '[]'`, "options", "must be an object"},
		{`'A', 'T', 'B', NULL, '{t}', '{"prio":"low"}'`, "options.prio", "is not an option; there are scheduled_at, expires_at, priority, delivery, image, link, idempotency_key, topic, recipients, fallback, notify"},
		{`'A', 'T', 'B', NULL, '{t}', '{"priority":3}'`, "priority", "must be a string"},
		{`'A', 'T', 'B', NULL, '{t}', '{"notify":"no"}'`, "notify", "must be true or false"},
		{`'A', 'T', 'B', NULL, '{t}', '{"idempotency_key":""}'`, "idempotency_key", "must be 1 to 255 printable characters"},
		{`'A', 'T', 'B', NULL, '{t}', '{"expires_at":"2020-01-01T00:00:00Z"}'`, "expires_at", "has passed already"},
		{`'A', 'T', 'B', NULL, '{t}', '{"expires_at":"1999-12-31T23:59:59Z"}'`, "expires_at", "lies before the year 2000"},
		{`'A', 'T', 'B', NULL, '{t}', '{"scheduled_at":"tomorrow"}'`, "scheduled_at", "must be a time with its zone as in RFC 3339, e.g. 2030-01-02T08:00:00+09:00"},
		{`'A', 'T', 'B', NULL, '{t}', '{"scheduled_at":"2030-02-30T08:00:00+09:00"}'`, "scheduled_at", "must be a time with its zone as in RFC 3339, e.g. 2030-01-02T08:00:00+09:00"},
		{`'A', 'T', 'B', NULL, '{t}', '{"scheduled_at":"2030-01-02T08:00:00"}'`, "scheduled_at", "must be a time with its zone as in RFC 3339, e.g. 2030-01-02T08:00:00+09:00"},
		{`'A', 'T', 'B', NULL, '{t}', '{"fallback":"x"}'`, "fallback", "must be an object"},
		{`'A', 'T', 'B', NULL, '{t}', '{"fallback":{"mail":"x"}}'`, "fallback.mail", "is not a field of a fallback; it has sms"},
		{`'A', 'T', 'B', NULL, '{t}', '{"fallback":{"sms":" "}}'`, "fallback.sms", "is required; leave fallback out for none"},
		{`'A', 'T', 'B', NULL, '{t}', '{"fallback":{"sms":7}}'`, "fallback.sms", "must be a string"},
		{`'A', 'T', 'B', NULL, '{t}', '{"topic":"board-3"}'`, "topic", "cannot go with recipients; give one of the two"},
		{`'A', 'T', 'B', NULL, NULL, '{"topic":"board-3","recipients":[]}'`, "topic", "cannot go with recipients; give one of the two"},
		{`'A', 'T', 'B', NULL, NULL, '{"topic":""}'`, "topic", "must be 1 to 255 of the characters A-Z a-z 0-9 . _ ~ % -"},
		{`'A', 'T', 'B', NULL, NULL, '{"topic":"with space"}'`, "topic", "must be 1 to 255 of the characters A-Z a-z 0-9 . _ ~ % -"},
	} {
		_, err := conn.Exec(t.Context(), `SELECT schoolbell_enqueue(`+c.args+`)`)
		pg := pgError(t, err, c.args)
		require.Equal(t, []string{"22023", c.field, c.field + ": " + c.want}, []string{pg.Code, pg.ColumnName, pg.Message}, c.args)
		require.NotEmpty(t, pg.Hint, c.args)
	}
	require.Equal(t, [][]string{{"0"}}, query(t, conn, `SELECT count(*) FROM push_clusters`))
	// What JSON made of a timestamptz has is taken, and so are arguments by name.
	exec(t, conn, `SELECT schoolbell_enqueue(school => 'A', title => 'T', tokens => '{t}',
		options => jsonb_build_object('scheduled_at', now() + interval '1 hour', 'expires_at', now() + interval '2 hours'))`)
}

// TestEnqueueToATopic resolves it in the same transaction; a topic that nobody has
// is a notice that has ended, of a school that is known afterwards.
func TestEnqueueToATopic(t *testing.T) {
	t.Parallel()
	url := migrated(t)
	db, conn := open(t, url), connect(t, url)
	accept(t, db, "A", 1)
	exec(t, conn, `INSERT INTO devices (school_id, token_sha, token, ref, retired_at)
		SELECT 'A', sha256(convert_to('d' || g, 'UTF8')), 'd' || g, 'r' || g, CASE WHEN g = 3 THEN now() END FROM generate_series(1, 5) g`)
	exec(t, conn, `INSERT INTO device_topics SELECT 'A', 'board-3', token_sha FROM devices WHERE token <> 'd5'`)
	e := simple("A")
	e.Tokens, e.Options = []string{}, map[string]any{"topic": "board-3"}
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `DELETE FROM device_topics WHERE token_sha = sha256('d4')`)
	require.NoError(t, err)
	id, err := enqueue(t.Context(), tx, e)
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context()))
	require.Equal(t, [][]string{{"d1", "r1"}, {"d2", "r2"}}, query(t, conn, `SELECT token, ref FROM push_cluster_tokens WHERE cluster_id = $1 ORDER BY token`, id))
	require.Equal(t, 2, progress(t, db, id).Counts.Waiting)
	for _, schoolID := range []string{"A", "new"} {
		e := simple(schoolID)
		e.Options = map[string]any{"topic": "nobodys"}
		id, err := enqueue(t.Context(), conn, e)
		require.NoError(t, err)
		p := progress(t, db, id)
		require.Equal(t, []any{school.NoticeCompleted, 0, false, "nobodys"}, []any{p.Status, p.Counts.Total, p.EndedAt.IsZero(), p.Notice.Topic})
		_, err = db.School(t.Context(), schoolID)
		require.NoError(t, err)
	}
}

// TestEnqueueIsTheCallersTransaction: committed it is there, rolled back it never
// was, to a savepoint too, at every isolation level; and the dispatchers are told
// at the commit, once a school.
func TestEnqueueIsTheCallersTransaction(t *testing.T) {
	t.Parallel()
	url := migrated(t)
	db, conn := open(t, url), connect(t, url)
	listener := connect(t, url)
	exec(t, listener, `LISTEN schoolbell_wake`)
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		name := strings.ReplaceAll(string(level), " ", "-")
		tx, err := conn.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
		require.NoError(t, err)
		lost, err := enqueue(t.Context(), tx, simple("rolled-"+name, "t"))
		require.NoError(t, err)
		require.NoError(t, tx.Rollback(t.Context()))

		tx, err = conn.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
		require.NoError(t, err)
		kept, err := enqueue(t.Context(), tx, simple("kept-"+name, "t"))
		require.NoError(t, err)
		inner, err := tx.Begin(t.Context())
		require.NoError(t, err)
		undone, err := enqueue(t.Context(), inner, simple("kept-"+name, "t"))
		require.NoError(t, err)
		other, err := enqueue(t.Context(), inner, simple("undone-"+name, "t"))
		require.NoError(t, err)
		require.NoError(t, inner.Rollback(t.Context()))
		again, err := enqueue(t.Context(), tx, simple("kept-"+name, "u"))
		require.NoError(t, err)
		_, err = db.Notice(t.Context(), kept)
		require.ErrorIs(t, err, school.ErrNotFound, "nobody sees it before the commit")
		require.NoError(t, tx.Commit(t.Context()))
		for _, id := range []int64{kept, again} {
			require.Equal(t, 1, progress(t, db, id).Counts.Waiting)
		}
		for _, id := range []int64{lost, undone, other} {
			_, err := db.Notice(t.Context(), id)
			require.ErrorIs(t, err, school.ErrNotFound)
			require.Equal(t, [][]string{{"0"}}, query(t, conn, `SELECT count(*) FROM push_cluster_tokens WHERE cluster_id = $1`, id))
		}
		require.Equal(t, [][]string{{"kept-" + name}}, query(t, conn, `SELECT id FROM schools WHERE id LIKE '%' || $1`, name))
		require.Equal(t, [][]string{{"kept-" + name}}, query(t, conn, `SELECT school_id FROM school_terms WHERE school_id LIKE '%' || $1`, name))

		quiet := simple("quiet", "t")
		quiet.Options = map[string]any{"notify": false}
		_, err = enqueue(t.Context(), conn, quiet)
		require.NoError(t, err)
		_, err = enqueue(t.Context(), conn, simple("mark-"+name, "t"))
		require.NoError(t, err)
		for _, want := range []string{"kept-" + name, "mark-" + name} {
			n, err := listener.WaitForNotification(t.Context())
			require.NoError(t, err)
			require.Equal(t, want, n.Payload)
		}
	}
	due, err := db.Due(t.Context(), time.Minute)
	require.NoError(t, err)
	require.Len(t, due, 7, "and all of them are work: three kept, three marks, one quiet")
}

// TestInterleaving08ANoticeThatCommitsLateIsFound: its id and its age are those of
// the moment when it was enqueued; by its commit later ones have come and gone.
func TestInterleaving08ANoticeThatCommitsLateIsFound(t *testing.T) {
	t.Parallel()
	url := migrated(t)
	db, conn := open(t, url), connect(t, url)
	accept(t, db, "A", 1)
	turnOf(t, db, "A", 10, 1)
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	late, err := enqueue(t.Context(), tx, simple("A", "t"))
	require.NoError(t, err)
	for range 3 {
		later := accept(t, db, "A", 1)
		require.Greater(t, later, late)
		turnOf(t, db, "A", 10, 1)
		require.Equal(t, school.NoticeCompleted, progress(t, db, later).Status)
		_, err := db.Sweep(t.Context())
		require.NoError(t, err)
	}
	due, err := db.Due(t.Context(), time.Minute)
	require.NoError(t, err)
	require.Empty(t, due)
	require.NoError(t, tx.Commit(t.Context()))
	due, err = db.Due(t.Context(), time.Minute)
	require.NoError(t, err)
	require.Len(t, due, 1)
	turnOf(t, db, "A", 10, 1)
	require.Equal(t, school.NoticeCompleted, progress(t, db, late).Status)
}

// TestEnqueueHoldsNobodyUp leaves a transaction open that enqueued for a school
// that is known, and for one that is not, and does everything else with both.
func TestEnqueueHoldsNobodyUp(t *testing.T) {
	t.Parallel()
	url := migrated(t)
	db, conn := open(t, url), connect(t, url)
	beside := connect(t, url)
	exec(t, beside, `SET lock_timeout = '100ms'`) // a wait fails
	accept(t, db, "known", 10)
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	for _, id := range []string{"known", "new"} {
		_, err := enqueue(t.Context(), tx, simple(id, "t"))
		require.NoError(t, err)
	}
	for _, id := range []string{"known", "new"} {
		_, err := enqueue(t.Context(), beside, simple(id, "t"))
		require.NoError(t, err, id)
		accept(t, db, id, 10)
		turnOf(t, db, id, 100, 11)
		require.NoError(t, db.Pause(t.Context(), id))
		require.NoError(t, db.Resume(t.Context(), id))
		limit := 70
		_, _, err = db.PutSchool(t.Context(), id, school.SchoolChange{Limit: &limit})
		require.NoError(t, err)
		_, err = db.Sweep(t.Context())
		require.NoError(t, err)
	}
	// Only a deletion of a school that the open transaction counts on waits, and
	// not for long.
	began := time.Now()
	require.ErrorIs(t, db.DeleteSchool(t.Context(), "known"), school.ErrUnavailable)
	require.Less(t, time.Since(began), 30*time.Second)
	require.NoError(t, tx.Commit(t.Context()))
	require.Equal(t, [][]string{{"70"}, {"70"}}, query(t, conn, `SELECT "limit" FROM schools ORDER BY id`))
	due, err := db.Due(t.Context(), time.Minute)
	require.NoError(t, err)
	require.Len(t, due, 2)
}

// TestEnqueueSurvivesTheDeletionOfItsSchool: a school that vanished before the
// commit is made again by it, with its ledger.
func TestEnqueueSurvivesTheDeletionOfItsSchool(t *testing.T) {
	t.Parallel()
	url := migrated(t)
	db, conn := open(t, url), connect(t, url)
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	_, err = enqueue(t.Context(), tx, simple("A", "t"))
	require.NoError(t, err)
	_, _, err = db.PutSchool(t.Context(), "A", school.SchoolChange{})
	require.NoError(t, err)
	require.NoError(t, db.DeleteSchool(t.Context(), "A"))
	require.NoError(t, tx.Commit(t.Context()))
	s, err := db.School(t.Context(), "A")
	require.NoError(t, err)
	require.Equal(t, 1, s.Waiting)
	require.EqualValues(t, 2, s.School.SettingsVersion)
}

// TestEnqueueIsIdempotent (R27): the key with the same request answers with the
// first id, whatever else changed; with another it raises; while the first is open
// it says so at once; a rolled back one leaves nothing of the key.
func TestEnqueueIsIdempotent(t *testing.T) {
	t.Parallel()
	url := migrated(t)
	db, conn := open(t, url), connect(t, url)
	other := connect(t, url)
	e := simple("A", "t", "u")
	e.Data = map[string]any{"a": "1", "b": "2"}
	e.Options = map[string]any{"idempotency_key": "key", "expires_at": time.Now().Add(time.Hour).UTC().Format(time.RFC3339)}
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	_, err = enqueue(t.Context(), tx, e)
	require.NoError(t, err)
	_, err = enqueue(t.Context(), other, e)
	require.Equal(t, "SB007", pgError(t, err, "busy").Code)
	require.NoError(t, tx.Rollback(t.Context()))

	tx, err = conn.Begin(t.Context())
	require.NoError(t, err)
	first, err := enqueue(t.Context(), tx, e)
	require.NoError(t, err)
	again, err := enqueue(t.Context(), tx, e)
	require.NoError(t, err)
	require.Equal(t, first, again, "within the transaction")
	require.NoError(t, tx.Commit(t.Context()))
	exec(t, conn, `UPDATE push_clusters SET expires_at = now() - interval '1 hour', job_status = 'COMPLETED'`)
	e.Options["notify"] = false
	again, err = enqueue(t.Context(), other, e)
	require.NoError(t, err)
	require.Equal(t, first, again, "however late it is asked again")

	for about, change := range map[string]func(e *enqueuing){
		"title":  func(e *enqueuing) { e.Title = "other" },
		"tokens": func(e *enqueuing) { e.Tokens = []string{"tu"} },
		"order":  func(e *enqueuing) { e.Tokens = []string{"u", "t"} },
		"data":   func(e *enqueuing) { e.Data = nil },
		"option": func(e *enqueuing) { e.Options = map[string]any{"idempotency_key": "key"} },
	} {
		changed := e
		change(&changed)
		_, err := enqueue(t.Context(), other, changed)
		require.Equal(t, "SB011", pgError(t, err, about).Code, about)
	}
	elsewhere := e
	elsewhere.School = "B"
	_, err = enqueue(t.Context(), other, elsewhere)
	require.NoError(t, err, "a key is a school's own")

	// By the API: its request is another one, and its key the same.
	n := notice("A")
	n.IdempotencyKey, n.RequestHash = "key", []byte("hash")
	_, err = db.Accept(t.Context(), n, 1, devices(1))
	require.ErrorIs(t, err, school.ErrIdempotencyMismatch)

	// A transaction that cannot see the first one has to be repeated.
	tx, err = conn.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `SELECT count(*) FROM push_clusters`)
	require.NoError(t, err)
	e.Options["idempotency_key"] = "second"
	_, err = enqueue(t.Context(), other, e)
	require.NoError(t, err)
	_, err = enqueue(t.Context(), tx, e)
	require.Equal(t, "40001", pgError(t, err, "repeat").Code)
	require.NoError(t, tx.Rollback(t.Context()))
}

// TestEnqueueNeedsNothingButTheRight calls it as a role that may do nothing else,
// from sessions that try to get something of their own in.
func TestEnqueueNeedsNothingButTheRight(t *testing.T) {
	t.Parallel()
	url := migrated(t)
	db, admin := open(t, url), connect(t, url)
	role := fmt.Sprintf("board_%d", time.Now().UnixNano())
	exec(t, admin, `CREATE ROLE `+role)
	t.Cleanup(func() {
		c, err := pgx.Connect(context.Background(), url)
		require.NoError(t, err)
		defer c.Close(context.Background())
		_, err = c.Exec(context.Background(), `DROP OWNED BY `+role+`; DROP ROLE `+role)
		require.NoError(t, err)
	})
	as := connect(t, url)
	exec(t, as, `SET ROLE `+role)
	_, err := enqueue(t.Context(), as, simple("A", "t"))
	require.Equal(t, "42501", pgError(t, err, "no right").Code, "not everybody may")
	exec(t, admin, `GRANT EXECUTE ON FUNCTION schoolbell_enqueue TO `+role)
	exec(t, admin, `GRANT CREATE ON SCHEMA public TO `+role)
	exec(t, admin, `CREATE SCHEMA mine AUTHORIZATION `+role)
	_, err = as.Exec(t.Context(), `SELECT count(*) FROM push_clusters`)
	require.Equal(t, "42501", pgError(t, err, "tables").Code)

	// What would be found first on the caller's path, or in its temporary schema.
	exec(t, as, `CREATE TABLE mine.push_clusters (id bigint)`)
	exec(t, as, `CREATE FUNCTION mine.floor(double precision) RETURNS double precision LANGUAGE plpgsql AS 'BEGIN RAISE ''mine''; END'`)
	exec(t, as, `CREATE FUNCTION mine.schoolbell_touch_school(text) RETURNS void LANGUAGE plpgsql AS 'BEGIN RAISE ''mine''; END'`)
	for i, set := range []string{
		`SET search_path = mine, pg_catalog, public`,
		`SET search_path = public`,
		`SET search_path = ''`,
		`SET standard_conforming_strings = off`,
		`SET TimeZone = 'America/New_York'; SET DateStyle = 'German'; SET IntervalStyle = 'sql_standard'`,
		`SET default_transaction_isolation = 'serializable'`,
		`SET plan_cache_mode = force_generic_plan; SET enable_indexscan = off; SET enable_hashagg = off`,
		`SET bytea_output = escape; SET array_nulls = off; SET transform_null_equals = on; SET plpgsql.extra_errors = 'all'`,
		`SET CONSTRAINTS ALL IMMEDIATE`,
	} {
		as := connect(t, url) // which has no plans yet
		exec(t, as, `SET ROLE `+role)
		exec(t, as, `CREATE TEMP TABLE push_cluster_tokens (id bigint)`)
		exec(t, as, `CREATE TEMP TABLE schools (id text)`)
		tx, err := as.Begin(t.Context())
		require.NoError(t, err)
		_, err = tx.Exec(t.Context(), set)
		require.NoError(t, err)
		var id string
		err = tx.QueryRow(t.Context(), `SELECT public.schoolbell_enqueue($1, 'T', 'B', NULL, '{t,u,t}', $2)`, fmt.Sprint("S", i),
			`{"scheduled_at":"2030-05-06T07:08:09+09:00","link":"https://x.example/","idempotency_key":"k"}`).Scan(&id)
		require.NoError(t, err, set)
		require.NoError(t, tx.Commit(t.Context()), set)
		n, err := school.ParseNoticeID(id)
		require.NoError(t, err)
		p := progress(t, db, n)
		require.Equal(t, 2, p.Counts.Waiting, set)
		require.True(t, p.Notice.ScheduledAt.Equal(time.Date(2030, 5, 5, 22, 8, 9, 0, time.UTC)), set)
		_, err = db.School(t.Context(), fmt.Sprint("S", i))
		require.NoError(t, err, set)
	}
	_, err = enqueue(t.Context(), as, enqueuing{})
	require.NotContains(t, pgError(t, err, "none").Message, "mine")
}

// TestEnqueueInASchemaOfItsOwn: the tables need not be in public, nor on the
// application's path.
func TestEnqueueInASchemaOfItsOwn(t *testing.T) {
	t.Parallel()
	url := localtest.Database(t)
	admin := connect(t, url)
	exec(t, admin, `CREATE SCHEMA "Bell"`)
	within := url + "&search_path=%22Bell%22"
	_, err := store.Migrate(t.Context(), within)
	require.NoError(t, err)
	exec(t, admin, `SELECT "Bell".schoolbell_enqueue('A', 'T', 'B', NULL, '{t}')`)
	s, err := open(t, within).School(t.Context(), "A")
	require.NoError(t, err)
	require.Equal(t, 1, s.Waiting)
}

// TestEnqueueBySixteenAtOnce: for schools that all of them make, with keys that
// some of them share; everything is stored once.
func TestEnqueueBySixteenAtOnce(t *testing.T) {
	t.Parallel()
	url := migrated(t)
	db := open(t, url)
	const clients, each = 16, 25
	ids := make([]map[int64]bool, clients)
	var wg sync.WaitGroup
	for c := range clients {
		conn := connect(t, url)
		ids[c] = map[int64]bool{}
		wg.Go(func() {
			for i := range each {
				e := simple(fmt.Sprint("S", (c+i)%5), "t", fmt.Sprint("u", c), "t")
				if i%5 == 0 {
					e = simple("shared", "t", "t", "v")
					e.Options = map[string]any{"idempotency_key": fmt.Sprint("key-", i)}
				}
				for {
					id, err := enqueue(t.Context(), conn, e)
					if pg, ok := errors.AsType[*pgconn.PgError](err); ok && pg.Code == "SB007" {
						continue // the key's first request is open
					}
					if err != nil {
						t.Error(err)
						return
					}
					ids[c][id] = true
					break
				}
			}
		})
	}
	wg.Wait()
	all := map[int64]bool{}
	for _, of := range ids {
		require.Len(t, of, each)
		for id := range of {
			all[id] = true
		}
	}
	require.Len(t, all, clients*each/5*4+each/5)
	conn := connect(t, url)
	require.Equal(t, [][]string{{fmt.Sprint(len(all)), fmt.Sprint(3 * len(all)), fmt.Sprint(len(all))}},
		query(t, conn, `SELECT count(*), sum(total_count), sum(skipped_duplicate_count) FROM push_clusters`))
	require.Equal(t, [][]string{{"0"}}, query(t, conn, `SELECT count(*) FROM school_arrivals`))
	stranded, err := db.Sweep(t.Context())
	require.NoError(t, err)
	require.Zero(t, stranded)
}
