package web

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/coordinator/api"
)

// TestClientAndServer lets the two halves of the API speak with each other over
// a real connection.
func TestClientAndServer(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	srv := httptest.NewServer(w.server.Handler())
	transport := &http.Transport{}
	t.Cleanup(func() {
		transport.CloseIdleConnections()
		srv.Close()
	})
	ctx := t.Context()
	c := &api.Client{BaseURL: srv.URL, Key: testKey, HTTP: &http.Client{Transport: transport}}

	until := testNow.Add(time.Hour)
	first, err := c.Send(ctx, api.NoticeRequest{School: "A", Title: "t", Body: "b", ExpiresAt: &until, Recipients: []api.Recipient{{Token: "1", Ref: "r"}}}, "k")
	require.NoError(t, err)
	require.Equal(t, api.Accepted{ID: "1", School: "A", Status: "PENDING", Total: 1}, first)

	const n = 20_000
	up, err := c.Upload(ctx, api.NoticeRequest{School: "A", Title: "<&>"}, func(yield func(api.Recipient, error) bool) {
		for i := range n {
			if !yield(api.Recipient{Token: fmt.Sprintf("tok-%d", i)}, nil) {
				return
			}
		}
	}, "")
	require.NoError(t, err)
	require.Equal(t, n, up.Total)

	notice, err := c.Notice(ctx, up.ID)
	require.NoError(t, err)
	require.Equal(t, "<&>", notice.Title)
	require.Equal(t, n, notice.Total)
	require.Equal(t, n, notice.Waiting)

	list, err := c.Notices(ctx, api.NoticeQuery{School: "A", Page: api.Page{Limit: 1}})
	require.NoError(t, err)
	require.Equal(t, "2", list.Items[0].ID)
	list, err = c.Notices(ctx, api.NoticeQuery{School: "A", Page: api.Page{Limit: 1, Cursor: list.Next}})
	require.NoError(t, err)
	require.Equal(t, "1", list.Items[0].ID)

	rows, err := c.Recipients(ctx, "1", api.RecipientQuery{State: "PENDING"})
	require.NoError(t, err)
	require.Equal(t, "r", rows.Items[0].Ref)

	limit, rest := 50, 0.2
	put, err := c.PutSchool(ctx, "A", api.SchoolChange{Limit: &limit, RestSeconds: &rest})
	require.NoError(t, err)
	got, err := c.School(ctx, "A")
	require.NoError(t, err)
	require.Equal(t, put, got)
	require.Equal(t, 0.2, got.RestSeconds)
	schools, err := c.Schools(ctx, api.Page{})
	require.NoError(t, err)
	require.Len(t, schools.Items, 1)

	cluster, err := c.Cluster(ctx)
	require.NoError(t, err)
	require.Equal(t, "one", cluster.Replicas[0].Instance)
	ready, err := c.Ready(ctx)
	require.NoError(t, err)
	require.True(t, ready.Ready)
	version, err := c.Version(ctx)
	require.NoError(t, err)
	require.Equal(t, "v0", version.Version)

	for field, call := range map[string]func() error{
		"recipients[1].token": func() error {
			_, err := c.Send(ctx, api.NoticeRequest{School: "A", Title: "t", Recipients: []api.Recipient{{Token: "1"}, {}}}, "")
			return err
		},
		"recipients[15000].token": func() error { // refused while the client still writes
			_, err := c.Upload(ctx, api.NoticeRequest{School: "A", Title: "t"}, func(yield func(api.Recipient, error) bool) {
				for i := 0; ; i++ {
					r := api.Recipient{Token: "t"}
					if i == 15_000 {
						r.Token = ""
					}
					if !yield(r, nil) {
						return
					}
				}
			}, "")
			return err
		},
		"title": func() error {
			_, err := c.Upload(ctx, api.NoticeRequest{School: "A"}, func(func(api.Recipient, error) bool) {}, "")
			return err
		},
	} {
		var e *api.Error
		require.True(t, errors.As(call(), &e), field)
		require.Equal(t, api.InvalidArgument, e.Code)
		require.Equal(t, field, e.Field)
		require.NotEmpty(t, e.RequestID)
	}
	_, err = (&api.Client{BaseURL: srv.URL, Key: "wrong", HTTP: c.HTTP}).Notice(ctx, "1")
	var e *api.Error
	require.True(t, errors.As(err, &e))
	require.Equal(t, api.Unauthenticated, e.Code)
	_, err = c.Notice(ctx, "12345")
	require.True(t, errors.As(err, &e))
	require.Equal(t, api.NotFound, e.Code)
	w.requireNothingLeft()
}
