package local

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
)

// Move is one slot of a Cluster on its way from the node that serves it to
// another, in the steps of redis-cli --cluster reshard. Until it is finished the
// slot is served by both: From answers for the keys that it still has and sends
// the others to To (ASK); a command on several keys that are not all on one side
// is told to come again (TRYAGAIN).
type Move struct {
	Slot     int
	From, To *Redis

	cluster *Cluster
	to      string // node id
}

// Slot is the hash slot of a key.
func (c *Cluster) Slot(ctx context.Context, key string) (int, error) {
	answer, err := c.Nodes[0].Do(ctx, "CLUSTER KEYSLOT "+key)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimPrefix(answer, ":"))
}

// Owner is the node that says that it serves the slot.
func (c *Cluster) Owner(ctx context.Context, slot int) (*Redis, error) {
	for _, node := range c.Nodes {
		known, err := node.Do(ctx, "CLUSTER NODES")
		if err != nil {
			return nil, err
		}
		for line := range strings.Lines(known) {
			if f := strings.Fields(line); len(f) > 8 && strings.Contains(f[2], "myself") && serves(f[8:], slot) {
				return node, nil
			}
		}
	}
	return nil, fmt.Errorf("slot %d: no node serves it", slot)
}

// serves looks for the slot among "0-5460 6000 [42->-id]".
func serves(ranges []string, slot int) bool {
	for _, r := range ranges {
		from, to, ok := strings.Cut(r, "-")
		if !ok {
			to = from
		}
		low, err := strconv.Atoi(from)
		high, err2 := strconv.Atoi(to)
		if err == nil && err2 == nil && low <= slot && slot <= high {
			return true
		}
	}
	return false
}

// Move begins to move a slot to another node. No key has moved when it returns.
func (c *Cluster) Move(ctx context.Context, slot int, to *Redis) (*Move, error) {
	from, err := c.Owner(ctx, slot)
	if err != nil {
		return nil, err
	}
	if from == to {
		return nil, fmt.Errorf("move slot %d: it is at %s already", slot, to.Addr())
	}
	m := &Move{Slot: slot, From: from, To: to, cluster: c}
	fromID, err := from.Do(ctx, "CLUSTER MYID")
	if err != nil {
		return nil, err
	}
	if m.to, err = to.Do(ctx, "CLUSTER MYID"); err != nil {
		return nil, err
	}
	if err := m.set(ctx, to, "IMPORTING "+fromID); err != nil {
		return nil, err
	}
	return m, m.set(ctx, from, "MIGRATING "+m.to)
}

func (m *Move) set(ctx context.Context, on *Redis, how string) error {
	_, err := on.Do(ctx, fmt.Sprintf("CLUSTER SETSLOT %d %s", m.Slot, how))
	return err
}

// Key moves one key; one that is not there is no error.
func (m *Move) Key(ctx context.Context, key string) error {
	host, port, err := net.SplitHostPort(m.To.Addr())
	if err != nil {
		return err
	}
	_, err = m.From.Do(ctx, fmt.Sprintf("MIGRATE %s %s %s 0 5000", host, port, key))
	return err
}

// Keys moves all keys that are left.
func (m *Move) Keys(ctx context.Context) error {
	for {
		left, err := m.From.Do(ctx, fmt.Sprintf("CLUSTER GETKEYSINSLOT %d 100", m.Slot))
		if err != nil {
			return err
		}
		keys := strings.Fields(left)
		if len(keys) == 0 {
			return nil
		}
		for _, key := range keys {
			if err := m.Key(ctx, key); err != nil {
				return err
			}
		}
	}
}

// Finish moves what is left and tells every node who serves the slot from now on.
func (m *Move) Finish(ctx context.Context) error {
	if err := m.Keys(ctx); err != nil {
		return err
	}
	// The new node first: between the two the slot must not be nobody's.
	errs := []error{m.set(ctx, m.To, "NODE "+m.to), m.set(ctx, m.From, "NODE "+m.to)}
	for _, node := range m.cluster.Nodes {
		if node != m.From && node != m.To {
			errs = append(errs, m.set(ctx, node, "NODE "+m.to))
		}
	}
	return errors.Join(errs...)
}
