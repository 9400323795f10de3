package web

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/coordinator/api"
	"schoolbell/school"
)

func TestIdempotency(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	first := w.post(small, "Idempotency-Key", "k")
	require.Empty(t, first.Header().Get("Idempotent-Replayed"))
	require.Equal(t, "/v1/notices/1", first.Header().Get("Location"))

	again := w.post(small, "Idempotency-Key", "k")
	require.Equal(t, http.StatusAccepted, again.Code)
	require.Equal(t, first.Body.String(), again.Body.String())
	require.Equal(t, "true", again.Header().Get("Idempotent-Replayed"))
	require.Equal(t, first.Header().Get("Location"), again.Header().Get("Location"))
	require.Equal(t, first.Body.String(), w.do(http.MethodPost, "/v1/notices", "Application/JSON; charset=UTF-8", strings.NewReader(small), "Idempotency-Key", "k").Body.String(),
		"the same media type, written otherwise")

	requireError(t, w.post(strings.Replace(small, `"b"`, `"c"`, 1), "Idempotency-Key", "k"), api.IdempotencyMismatch, "Idempotency-Key")
	requireError(t, w.upload(strings.NewReader(head+`{"token":"tok-1"}`), "Idempotency-Key", "k"), api.IdempotencyMismatch, "Idempotency-Key")
	require.Equal(t, http.StatusAccepted, w.post(strings.Replace(small, `"A"`, `"B"`, 1), "Idempotency-Key", "k").Code, "another school's key")
	require.Equal(t, http.StatusAccepted, w.post(small).Code, "no key")
	_, _, kept := w.store.counts()
	require.Equal(t, 3, kept)

	upload := w.upload(strings.NewReader(head+`{"token":"tok-1"}`), "Idempotency-Key", "u")
	require.Equal(t, upload.Body.String(), w.upload(strings.NewReader(head+`{"token":"tok-1"}`), "Idempotency-Key", "u").Body.String())
	requireError(t, w.upload(strings.NewReader(head+`{"token":"tok-2"}`), "Idempotency-Key", "u"), api.IdempotencyMismatch, "Idempotency-Key")
	w.requireNothingLeft()
}

func TestNoticeToATopic(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	w.store.topics = map[string]int{"board-3": 4}
	const toBoard = `{"school":"A","title":"t","topic":"board-3"}`
	accepted := requireAnswer[api.Accepted](t, w.post(toBoard, "Idempotency-Key", "k"), http.StatusAccepted)
	require.Equal(t, api.Accepted{ID: "1", School: "A", Status: "PENDING", Total: 4}, accepted)
	shown := requireAnswer[api.Notice](t, w.get("/v1/notices/1"), http.StatusOK)
	require.Equal(t, []any{"board-3", 4}, []any{shown.Topic, shown.Total})
	require.Equal(t, []string{"A"}, w.waker.woken)

	w.store.topics["board-3"] = 5
	require.Equal(t, accepted, requireAnswer[api.Accepted](t, w.post(toBoard, "Idempotency-Key", "k"), http.StatusAccepted), "the first answer")

	const toNobody = `{"school":"A","title":"t","topic":"empty"}`
	for range 2 {
		require.Equal(t, api.Accepted{ID: "2", School: "A", Status: "COMPLETED"},
			requireAnswer[api.Accepted](t, w.post(toNobody, "Idempotency-Key", "e"), http.StatusAccepted), "nobody to wait for")
	}
}

func TestIdempotencyKeyIsChecked(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	for _, key := range []string{"", "a\tb", "\x7f", strings.Repeat("k", 256), "\xff"} {
		requireError(t, w.post(small, "Idempotency-Key", key), api.InvalidArgument, "Idempotency-Key")
	}
	require.Equal(t, http.StatusAccepted, w.post(small, "Idempotency-Key", strings.Repeat("k", 255)).Code)
	require.Equal(t, http.StatusAccepted, w.post(small, "Idempotency-Key", "3월 공지").Code)
	r := httptest.NewRequest(http.MethodPost, "/v1/notices", strings.NewReader(small))
	r.Header = http.Header{"Authorization": {"Bearer " + testKey}, "Content-Type": {api.JSON}, "Idempotency-Key": {"a", "b"}}
	rec := httptest.NewRecorder()
	w.server.Handler().ServeHTTP(rec, r)
	requireError(t, rec, api.InvalidArgument, "Idempotency-Key")
}

// TestSameKeyWhileUnderWay: the second is refused at its first line, not after
// its last.
func TestSameKeyWhileUnderWay(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	pr, pw := io.Pipe()
	done := make(chan *httptest.ResponseRecorder, 1)
	go func() { done <- w.upload(pr, "Idempotency-Key", "k") }()
	_, err := io.WriteString(pw, head)
	require.NoError(t, err)
	_, err = io.WriteString(pw, tokenLine(0)+"\n") // the first line has been taken in by now
	require.NoError(t, err)

	for _, rec := range []*httptest.ResponseRecorder{
		w.upload(strings.NewReader(head+"this is never read"), "Idempotency-Key", "k"), w.post(small, "Idempotency-Key", "k"),
	} {
		requireError(t, rec, api.Conflict, "Idempotency-Key")
		require.Equal(t, "1", rec.Header().Get("Retry-After"))
	}
	require.Equal(t, http.StatusAccepted, w.post(small, "Idempotency-Key", "other").Code)
	require.NoError(t, pw.Close())
	first := <-done
	require.Equal(t, http.StatusAccepted, first.Code)
	require.Equal(t, first.Body.String(), w.upload(strings.NewReader(head+tokenLine(0)+"\n"), "Idempotency-Key", "k").Body.String())
	w.requireNothingLeft()
}

// TestRepeatAfterExpiry: the same request gets its first answer however late it
// comes; a new one that has expired is refused, key or not, and nothing is kept.
func TestFallback(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(c *Config, _ *Deps) { c.Fallback = true })
	require.Equal(t, http.StatusAccepted, w.post(with(`"fallback":{"sms":"call us"}`)).Code)
	require.Equal(t, http.StatusAccepted, w.post(with(`"fallback":null`)).Code)
	require.Equal(t, http.StatusAccepted, w.upload(strings.NewReader(`{"school":"A","title":"t","fallback":{"sms":"call us"}}`+"\n"+`{"token":"a"}`+"\n")).Code)
	require.Equal(t, []string{"call us", "", "call us"},
		[]string{w.store.notices[1].notice.Fallback, w.store.notices[2].notice.Fallback, w.store.notices[3].notice.Fallback})
	require.Contains(t, w.get("/v1/notices/1").Body.String(), `"fallback":{"pending":1,"sent":2,"failed":3}`)
	require.NotContains(t, w.get("/v1/notices/2").Body.String(), `fallback`)
	require.Contains(t, w.get("/v1/notices/1/recipients").Body.String(), `"fallback":"SENT"`)
	require.NotContains(t, w.get("/v1/notices/2/recipients").Body.String(), `fallback`)

	bare := newWorld(t, nil)
	rec := bare.post(with(`"fallback":{"sms":"call us"}`))
	requireError(t, rec, api.InvalidArgument, "fallback")
	require.Contains(t, rec.Body.String(), "set fallback.url (SCHOOLBELL_FALLBACK_URL)")
	require.NotContains(t, rec.Body.String(), "call us")
	requireError(t, bare.upload(strings.NewReader(`{"school":"A","title":"t","fallback":{"sms":"call us"}}`+"\n"+`{"token":"a"}`+"\n")), api.InvalidArgument, "fallback")
}

func TestRepeatAfterExpiry(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(_ *Config, d *Deps) { d.Now = func() time.Time { return testNow.Add(24 * time.Hour) } })
	body := with(`"expires_at":"` + testNow.Add(time.Minute).Format(time.RFC3339) + `"`)
	upload := strings.Replace(head, "}", `,"expires_at":"`+testNow.Add(time.Minute).Format(time.RFC3339)+`"}`, 1) + tokenLine(0)
	first, second := w.post(body, "Idempotency-Key", "k"), w.upload(strings.NewReader(upload), "Idempotency-Key", "u")
	require.Equal(t, http.StatusAccepted, first.Code)
	require.Equal(t, http.StatusAccepted, second.Code)

	w.store.mu.Lock()
	w.store.later = time.Hour // what this replica believes is nobody's business
	w.store.mu.Unlock()
	require.Equal(t, first.Body.String(), w.post(body, "Idempotency-Key", "k").Body.String())
	require.Equal(t, second.Body.String(), w.upload(strings.NewReader(upload), "Idempotency-Key", "u").Body.String())
	requireError(t, w.post(body, "Idempotency-Key", "u"), api.IdempotencyMismatch, "Idempotency-Key")
	requireError(t, w.post(body, "Idempotency-Key", "new"), api.InvalidArgument, "expires_at")
	requireError(t, w.upload(strings.NewReader(upload), "Idempotency-Key", "new"), api.InvalidArgument, "expires_at")
	requireError(t, w.post(body), api.InvalidArgument, "expires_at")
	_, _, kept := w.store.counts()
	require.Equal(t, 2, kept)
}

func TestErrorsOfTheStore(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		err   error
		code  api.Code
		field string
		retry string
	}{
		"field":        {&school.FieldError{Field: "recipients[3].token", Message: "m"}, api.InvalidArgument, "recipients[3].token", ""},
		"size":         {&school.FieldError{Field: "recipients", Message: "m", Size: true}, api.TooLarge, "recipients", ""},
		"not found":    {school.ErrNotFound, api.NotFound, "", ""},
		"mismatch":     {school.ErrIdempotencyMismatch, api.IdempotencyMismatch, "Idempotency-Key", ""},
		"conflict":     {school.ErrConflict, api.Conflict, "", "1"},
		"unavailable":  {school.ErrUnavailable, api.Unavailable, "", "1"},
		"unknown":      {school.ErrCommitUnknown, api.Unavailable, "", "1"},
		"too long":     {context.DeadlineExceeded, api.Unavailable, "", "1"},
		"no room":      {syscall.ENOSPC, api.Unavailable, "", "30"},
		"rate":         {&api.Error{Code: api.RateLimited, Message: "m", RetryAfter: 1500 * time.Millisecond}, api.RateLimited, "", "2"},
		"rate, no say": {&api.Error{Code: api.RateLimited, Message: "m"}, api.RateLimited, "", "1"},
		"anything":     {errors.New("pq: password of user postgres"), api.Internal, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, nil)
			w.store.err = fmt.Errorf("accept: %w", c.err)
			rec := w.post(small)
			requireError(t, rec, c.code, c.field)
			require.Equal(t, c.retry, rec.Header().Get("Retry-After"))
			require.NotContains(t, rec.Body.String(), "postgres")
			require.Empty(t, w.waker.woken)
		})
	}
}

func TestPathsAndMethods(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	for _, target := range []string{"/", "/v1", "/v1/notice", "/v1/notices/", "/v1/notices/1/stop", "/v2/notices", "/v1/schools/A/stop"} {
		requireError(t, w.get(target), api.NotFound, "")
	}
	for target, allow := range map[string]string{
		"/v1/notices/1/cancel": "POST", "/v1/schools/A/pause": "POST", "/v1/schools/A/resume": "POST",
		"/v1/notices": "GET, HEAD, POST", "/v1/notices/1": "GET, HEAD", "/v1/schools/A": "GET, HEAD, PUT", "/healthz": "GET, HEAD", "/metrics": "GET, HEAD",
	} {
		for _, method := range []string{http.MethodDelete, http.MethodPatch, http.MethodOptions, "BREW"} {
			rec := w.do(method, target, "", nil)
			if method == "BREW" && rec.Code == http.StatusMethodNotAllowed && rec.Header().Get("Allow") == "" {
				t.Fatal("a method that nobody knows still gets Allow")
			}
			requireError(t, rec, api.MethodNotAllowed, "")
			require.Equal(t, allow, rec.Header().Get("Allow"), "%s %s", method, target)
		}
	}
	require.Equal(t, "there is no notice 99", requireError(t, w.get("/v1/notices/99"), api.NotFound, "").Message)
	require.Equal(t, "there is no notice 99", requireError(t, w.get("/v1/notices/99/recipients"), api.NotFound, "").Message)
	require.Equal(t, "there is no notice x", requireError(t, w.get("/v1/notices/x"), api.NotFound, "").Message)
	require.Equal(t, "there is no school B", requireError(t, w.get("/v1/schools/B"), api.NotFound, "").Message)
	require.Equal(t, `there is no school "한빛\n"`, requireError(t, w.get("/v1/schools/%ED%95%9C%EB%B9%9B%0A"), api.NotFound, "").Message)
	for _, id := range []string{"0", "-1", "x", "01", "99999999999999999999", "1%2f"} {
		requireError(t, w.get("/v1/notices/"+id), api.NotFound, "")
		requireError(t, w.get("/v1/notices/"+id+"/recipients"), api.NotFound, "")
	}
	rec := w.do(http.MethodHead, "/v1/schools", "", nil)
	require.Equal(t, http.StatusOK, rec.Code)
}

func TestMediaTypes(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	for _, contentType := range []string{"", "text/plain", "application/xml", "application/json; charset=euc-kr", "multipart/form-data; boundary=x", "application/"} {
		requireError(t, w.do(http.MethodPost, "/v1/notices", contentType, strings.NewReader(small)), api.UnsupportedMediaType, "")
		requireError(t, w.do(http.MethodPut, "/v1/schools/A", contentType, strings.NewReader(`{}`)), api.UnsupportedMediaType, "")
	}
	requireError(t, w.do(http.MethodPut, "/v1/schools/A", api.NDJSON, strings.NewReader(`{}`)), api.UnsupportedMediaType, "")
	requireError(t, w.post(small, "Content-Encoding", "gzip"), api.UnsupportedMediaType, "")
}

func TestBodySize(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	fill := func(n int) string { return small + strings.Repeat(" ", n-len(small)) }
	require.Equal(t, http.StatusAccepted, w.post(fill(maxBody)).Code)
	requireError(t, w.post(fill(maxBody+1)), api.TooLarge, "")
	// Without a length the body itself must be measured.
	requireError(t, w.do(http.MethodPost, "/v1/notices", api.JSON, io.MultiReader(strings.NewReader(fill(maxBody)), strings.NewReader(" "))), api.TooLarge, "")
	require.True(t, w.server.bodies.TryAcquire(w.server.cfg.MaxBodies))
	requireError(t, w.post(small), api.Unavailable, "")
	w.server.bodies.Release(w.server.cfg.MaxBodies)
	require.Equal(t, http.StatusAccepted, w.post(small).Code)
}

func TestLists(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	for i := range 5 {
		require.Equal(t, http.StatusAccepted, w.post(strings.Replace(small, `"A"`, fmt.Sprintf(`"S%d"`, i%2), 1)).Code)
	}
	require.Equal(t, http.StatusAccepted, w.upload(generated(7, tokenLine)).Code)

	ids := func(target string) (ids []string, next string) {
		list := requireAnswer[api.List[api.Notice]](t, w.get(target), http.StatusOK)
		for _, n := range list.Items {
			ids = append(ids, n.ID)
			require.Empty(t, n.Body)
		}
		return ids, list.Next
	}
	got, next := ids("/v1/notices")
	require.Equal(t, []string{"6", "5", "4", "3", "2", "1"}, got)
	require.Empty(t, next)
	got, next = ids("/v1/notices?limit=4")
	require.Equal(t, []string{"6", "5", "4", "3"}, got)
	got, next = ids("/v1/notices?limit=4&cursor=" + next)
	require.Equal(t, []string{"2", "1"}, got)
	require.Empty(t, next)
	got, _ = ids("/v1/notices?school=S1&status=PENDING")
	require.Equal(t, []string{"4", "2"}, got)
	require.JSONEq(t, `{"items":[],"next":""}`, w.get("/v1/notices?status=COMPLETED").Body.String())

	var seqs []int
	target := "/v1/notices/6/recipients?limit=3"
	for cursor := ""; ; {
		list := requireAnswer[api.List[api.RecipientStatus]](t, w.get(target+cursor), http.StatusOK)
		for _, r := range list.Items {
			seqs = append(seqs, r.Seq)
			require.Equal(t, fmt.Sprintf("6.%d", r.Seq), r.MessageID)
		}
		if list.Next == "" {
			break
		}
		cursor = "&cursor=" + list.Next
	}
	require.Equal(t, []int{1, 2, 3, 4, 5, 6, 7}, seqs)
	requireError(t, w.get("/v1/notices/99/recipients"), api.NotFound, "")

	schools := requireAnswer[api.List[api.School]](t, w.get("/v1/schools?limit=2"), http.StatusOK)
	require.Equal(t, "S0", schools.Next)
	schools = requireAnswer[api.List[api.School]](t, w.get("/v1/schools?limit=2&cursor=S0"), http.StatusOK)
	require.Len(t, schools.Items, 1)
	require.Empty(t, schools.Next)

	for target, field := range map[string]string{
		"/v1/notices?limit=0": "limit", "/v1/notices?limit=1001": "limit", "/v1/notices?limit=x": "limit", "/v1/notices?limit=": "limit",
		"/v1/notices?cursor=x": "cursor", "/v1/notices?cursor=-1": "cursor", "/v1/notices?status=pending": "status", "/v1/notices?school=A}": "school",
		"/v1/notices?school=": "school", "/v1/notices?stat=PENDING": "stat", "/v1/notices?limit=1&limit=2": "limit", "/v1/notices?a=%zz": "",
		"/v1/notices/6/recipients?state=SENT": "state", "/v1/notices/6/recipients?error=%00": "error", "/v1/notices/6/recipients?cursor=1000001": "cursor",
		"/v1/schools?cursor=}": "cursor", "/v1/schools?school=A": "school",
	} {
		requireError(t, w.get(target), api.InvalidArgument, field)
	}
	for _, target := range []string{"/v1/notices?limit=1000", "/v1/notices/6/recipients?error=UNREGISTERED&state=IN_PROGRESS"} {
		require.Equal(t, http.StatusOK, w.get(target).Code)
	}
}

// principals is an Authenticator for tests: the key is the name.
type principals map[string]Principal

func (p principals) Authenticate(_ context.Context, key string) (Principal, error) {
	if key == "broken" {
		return Principal{}, fmt.Errorf("read key: %w", school.ErrUnavailable)
	}
	who, ok := p[key]
	if !ok {
		return Principal{}, ErrUnknownKey
	}
	return who, nil
}

func TestKeys(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	for name, header := range map[string][]string{
		"none": nil, "empty": {""}, "no scheme": {testKey}, "another scheme": {"Basic " + testKey}, "no key": {"Bearer"}, "blank key": {"Bearer  "},
		"wrong": {"Bearer wrong"}, "longer": {"Bearer " + testKey + "x"}, "shorter": {"Bearer " + testKey[1:]}, "two": {"Bearer " + testKey, "Bearer " + testKey},
	} {
		rec := httptest.NewRecorder()
		r := httptest.NewRequest(http.MethodPost, "/v1/notices", unreadBody{t, rec})
		r.Header = http.Header{"Content-Type": {api.JSON}, "Authorization": header}
		w.server.Handler().ServeHTTP(rec, r)
		requireError(t, rec, api.Unauthenticated, "")
		require.Contains(t, rec.Header().Get("WWW-Authenticate"), "Bearer", name)
	}
	r := httptest.NewRequest(http.MethodGet, "/v1/notices", nil)
	r.Header.Set("Authorization", "bearer   "+testKey)
	rec := httptest.NewRecorder()
	w.server.Handler().ServeHTTP(rec, r)
	require.Equal(t, http.StatusOK, rec.Code)

	_, err := AdminKey("").Authenticate(t.Context(), "")
	require.ErrorIs(t, err, ErrUnknownKey, "no admin key lets nobody in")
	p, err := Everyone().Authenticate(t.Context(), "")
	require.NoError(t, err)
	require.True(t, p.May(Admin))
}

// unreadBody is a body that must not be read before the request was refused.
type unreadBody struct {
	t   *testing.T
	rec *httptest.ResponseRecorder
}

func (u unreadBody) Read([]byte) (int, error) {
	if !u.rec.Flushed {
		u.t.Error("the body was read before the key")
	}
	return 0, io.EOF
}

func TestRolesAndScopes(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(_ *Config, d *Deps) {
		d.Auth = principals{
			"reader":   {Name: "reader", Roles: Read},
			"ingester": {Name: "ingester", Roles: Ingest},
			"both":     {Name: "both", Roles: Read | Ingest, Schools: []string{"A"}},
			"adminA":   {Name: "adminA", Roles: Admin, Schools: []string{"A"}},
			"admin":    {Name: "admin", Roles: Admin},
		}
	})
	b := strings.Replace(small, `"A"`, `"B"`, 1)
	ask := func(key, method, target, body string) *httptest.ResponseRecorder {
		contentType := ""
		if body != "" {
			contentType = api.JSON
		}
		return w.do(method, target, contentType, strings.NewReader(body), "Authorization", "Bearer "+key)
	}
	require.Equal(t, http.StatusAccepted, ask("admin", "POST", "/v1/notices", small).Code) // notice 1, school A
	require.Equal(t, http.StatusAccepted, ask("admin", "POST", "/v1/notices", b).Code)     // notice 2, school B
	for _, c := range []struct {
		key, method, target, body string
		code                      api.Code
	}{
		{"reader", "GET", "/v1/notices", "", ""},
		{"reader", "POST", "/v1/notices", small, api.PermissionDenied},
		{"reader", "PUT", "/v1/schools/A", `{}`, api.PermissionDenied},
		{"reader", "GET", "/v1/cluster", "", ""},
		{"ingester", "POST", "/v1/notices", small, ""},
		{"ingester", "GET", "/v1/notices/1", "", api.PermissionDenied},
		{"both", "POST", "/v1/notices", small, ""},
		{"both", "POST", "/v1/notices", b, api.PermissionDenied},
		{"both", "GET", "/v1/notices/1", "", ""},
		{"both", "GET", "/v1/notices/2", "", api.NotFound},
		{"both", "GET", "/v1/notices/2/recipients", "", api.NotFound}, // in the words for one that nobody has
		{"both", "GET", "/v1/notices", "", api.PermissionDenied},
		{"both", "GET", "/v1/notices?school=A", "", ""},
		{"both", "GET", "/v1/notices?school=B", "", api.PermissionDenied},
		{"both", "GET", "/v1/schools/B", "", api.PermissionDenied},
		{"both", "PUT", "/v1/schools/A", `{}`, api.PermissionDenied},
		{"reader", "POST", "/v1/notices/1/cancel", "", api.PermissionDenied},
		{"both", "POST", "/v1/notices/2/cancel", "", api.NotFound},
		{"ingester", "POST", "/v1/notices/2/cancel", "", ""},
		{"ingester", "POST", "/v1/schools/A/pause", "", api.PermissionDenied},
		{"adminA", "POST", "/v1/schools/A/pause", "", ""},
		{"reader", "POST", "/v1/notices/1/retry", "", api.PermissionDenied},
		{"both", "POST", "/v1/notices/2/retry", "", api.NotFound},
		{"both", "POST", "/v1/notices/1/retry", "", ""},
		{"ingester", "GET", "/v1/failures", "", api.PermissionDenied},
		{"reader", "GET", "/v1/failures", "", ""},
		{"both", "GET", "/v1/failures?school=A", "", ""},
		{"both", "GET", "/v1/failures?school=B", "", api.PermissionDenied},
		{"both", "GET", "/v1/failures?notice=2", "", api.NotFound},
		{"both", "POST", "/v1/failures/requeue", `{"school":"A"}`, api.PermissionDenied},
		{"adminA", "POST", "/v1/failures/requeue", `{"school":"A"}`, ""},
		{"adminA", "POST", "/v1/failures/requeue", `{"school":"B"}`, api.PermissionDenied},
		{"adminA", "POST", "/v1/failures/requeue", `{"notice":"2"}`, api.NotFound},
		{"admin", "POST", "/v1/failures/requeue", `{"code":"X"}`, ""},
		{"adminA", "POST", "/v1/schools/B/pause", "", api.PermissionDenied},
		{"adminA", "POST", "/v1/schools/B/resume", "", api.PermissionDenied},
		{"adminA", "PUT", "/v1/schools/A", `{}`, ""},
		{"adminA", "PUT", "/v1/schools/B", `{}`, api.PermissionDenied},
		{"broken", "GET", "/v1/notices", "", api.Unavailable},
	} {
		rec := ask(c.key, c.method, c.target, c.body)
		if c.code == "" {
			require.Less(t, rec.Code, 300, "%+v: %s", c, rec.Body.String())
			continue
		}
		var field string
		if c.target == "/v1/notices" && c.method == "GET" && c.key == "both" {
			field = "school"
		}
		requireError(t, rec, c.code, field)
	}
	require.Equal(t, "there is no notice 2", requireError(t, ask("both", "GET", "/v1/notices/2", ""), api.NotFound, "").Message)
	// Before the rest of an upload is read.
	rec := w.upload(io.MultiReader(strings.NewReader(strings.Replace(head, `"A"`, `"B"`, 1)+"x\n")), "Authorization", "Bearer both")
	requireError(t, rec, api.PermissionDenied, "")
	list := requireAnswer[api.List[api.School]](t, ask("both", "GET", "/v1/schools", ""), http.StatusOK)
	require.Len(t, list.Items, 1)
	require.Equal(t, "A", list.Items[0].ID)
}

func TestOperationsWithKey(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(c *Config, _ *Deps) { c.OperationsNeedKey = true })
	for target, status := range map[string]int{"/healthz": 200, "/readyz": 200, "/metrics": 401, "/version": 401, "/openapi.yaml": 401} {
		rec := httptest.NewRecorder()
		w.server.Handler().ServeHTTP(rec, httptest.NewRequest(http.MethodGet, target, nil))
		require.Equal(t, status, rec.Code, target)
		require.Equal(t, http.StatusOK, w.get(target).Code, target)
	}
}
