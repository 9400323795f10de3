package node

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"schoolbell/coordinator/api"
	"schoolbell/sender/simulator"
)

// TestBrake: where every device of a school comes back as unregistered, none is
// retired; all that the receiver refused are flagged, for whoever clears or
// confirms them. Where one in twenty does, exactly those are retired. Judged from
// what the receiver answered, while two replicas share the schools, through
// notices to a topic.
func TestBrake(t *testing.T) {
	t.Parallel()
	srv := startServers(t)
	var log events
	one, two := run(t, srv.settings("one"), Deps{Log: log.logger()}), run(t, srv.settings("two"), Deps{Log: log.logger()})
	const each = 450 // within a cycle; the last batch is small
	everyone := []string{"everyone"}
	devices := func(school string, from, to int) (list []api.NewDevice) {
		for i := from; i < to; i++ {
			list = append(list, api.NewDevice{Token: fmt.Sprintf("device-%s-%d", school, i), Topics: &everyone})
		}
		return list
	}
	for _, school := range []string{"wrong", "cleared", "right"} {
		done, err := one.client.PutDevices(t.Context(), school, devices(school, 0, each))
		require.NoError(t, err)
		require.Equal(t, api.Registered{School: school, Devices: each, Created: each}, done)
	}
	// send posts to everyone while the receiver knows a share of the devices no more.
	send := func(school string, unregistered float64, total int) (gone []string) {
		t.Helper()
		before := len(srv.receiver.Arrivals())
		require.NoError(t, srv.receiver.SetBehaviour(simulator.Behaviour{Outcomes: map[string]float64{"UNREGISTERED": unregistered}}))
		a, err := two.client.Send(t.Context(), api.NoticeRequest{School: school, Title: "t", Topic: "everyone"}, "")
		require.NoError(t, err)
		require.Equal(t, total, a.Total)
		eventually(t, "the notice ends", func() bool {
			n, err := two.client.Notice(t.Context(), a.ID)
			require.NoError(t, err)
			return n.EndedAt != nil
		})
		for _, arrival := range srv.receiver.Arrivals()[before:] {
			if arrival.Answer == "UNREGISTERED" {
				gone = append(gone, arrival.TokenSHA)
			}
		}
		n, err := two.client.Notice(t.Context(), a.ID)
		require.NoError(t, err)
		require.Equal(t, []int{len(gone), total - len(gone)}, []int{n.Fail, n.Success})
		slices.Sort(gone)
		return gone
	}
	// keys lists devices, as the receiver's log names them.
	keys := func(school, retired string, which func(api.Device) bool) (keys []string) {
		t.Helper()
		list, err := two.client.Devices(t.Context(), school, api.DeviceQuery{Page: api.Page{Limit: 1000}, Retired: retired})
		require.NoError(t, err)
		for _, d := range list.Items {
			if which == nil || which(d) {
				keys = append(keys, d.Key[:16])
			}
		}
		return keys
	}
	flagged := func(d api.Device) bool { return d.Flagged }

	gone := send("right", 0.05, each)
	require.NotEmpty(t, gone)
	require.Equal(t, gone, keys("right", "true", nil))
	require.Empty(t, keys("right", "", flagged))

	all := send("wrong", 1, each)
	require.Len(t, all, each)
	require.Empty(t, keys("wrong", "true", nil))
	require.Equal(t, all, keys("wrong", "", flagged))
	send("cleared", 1, each)
	list, err := one.client.Brakes(t.Context(), api.BrakeQuery{Open: true})
	require.NoError(t, err)
	require.Len(t, list.Items, 2, "one a school and sender, however many batches")
	for _, b := range list.Items {
		require.Equal(t, []any{"relay", each}, []any{b.Sender, b.Flagged})
		require.Equal(t, b.Unregistered, b.Size)
	}
	ready, err := one.client.Ready(t.Context())
	require.NoError(t, err)
	require.True(t, ready.Ready)
	require.Equal(t, "2 brakes are on", ready.Checks["brakes"])
	require.Equal(t, []string{"brakes"}, ready.Degraded)
	cluster, err := one.client.Cluster(t.Context())
	require.NoError(t, err)
	require.Equal(t, 2, cluster.OpenBrakes)

	// While it is on, nobody is retired, however few are gone.
	few := send("wrong", 0.05, each)
	require.NotEmpty(t, few)
	require.Empty(t, keys("wrong", "true", nil))

	_, err = two.client.PutDevices(t.Context(), "wrong", devices("wrong", 0, 50))
	require.NoError(t, err)
	closed, err := two.client.ConfirmBrake(t.Context(), list.Items[1].ID)
	require.NoError(t, err)
	require.Equal(t, []any{"wrong", "confirmed", each - 50}, []any{closed.School, closed.ClosedAs, closed.Retired})
	require.Len(t, keys("wrong", "true", nil), each-50)
	require.Len(t, keys("wrong", "false", nil), 50, "registered since")
	require.Empty(t, send("wrong", 0, 50))

	closed, err = one.client.ClearBrake(t.Context(), list.Items[0].ID)
	require.NoError(t, err)
	require.Equal(t, []any{"cleared", "cleared", 0}, []any{closed.School, closed.ClosedAs, closed.Retired})
	require.Empty(t, keys("cleared", "true", nil))
	gone = send("cleared", 0.05, each)
	require.Equal(t, gone, keys("cleared", "true", nil), "judged anew")
	eventually(t, "nothing is degraded", func() bool {
		ready, err := one.client.Ready(t.Context())
		return err == nil && len(ready.Degraded) == 0
	})
	require.NoError(t, one.end(t))
	require.NoError(t, two.end(t))

	engaged := map[string]int{}
	for _, line := range log.lines(t) {
		if line["event"] == "brake_engaged" {
			engaged[line["school"].(string)]++
		}
	}
	require.Equal(t, map[string]int{"wrong": 1, "cleared": 1}, engaged)
	require.NotContains(t, log.text.String(), "device-", "no token in a log")
}
