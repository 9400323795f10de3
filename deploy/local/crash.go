package local

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
)

// Roles are the two that hold data, by the part that each plays as the Sentinels
// see it now.
func (s *Sentinel) Roles(ctx context.Context) (master, replica *Redis, err error) {
	addr, err := s.MasterAddr(ctx)
	if err != nil {
		return nil, nil, err
	}
	switch addr {
	case s.Master.Addr():
		return s.Master, s.Replica, nil
	case s.Replica.Addr():
		return s.Replica, s.Master, nil
	}
	return nil, nil, fmt.Errorf("ask sentinels for the master: %s is none of ours", addr)
}

// Crash makes the master die (SIGKILL) and waits until the replica has its place. For
// as long as alone says, the master takes writes that the replica does not get:
// these are lost. The dead one comes back as the new master's replica at once,
// instead of being a second master until the Sentinels find it.
func (s *Sentinel) Crash(ctx context.Context, alone time.Duration) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("crash the master: %w", err)
		}
	}()
	master, replica, err := s.Roles(ctx)
	if err != nil {
		return err
	}
	// The replica may come back at any time, so it is not let in. Bytes that lie
	// in its buffers would count as replicated.
	for _, command := range []string{"ACL SETUSER default -psync -sync", "CLIENT KILL TYPE replica"} {
		if _, err := master.Do(ctx, command); err != nil {
			return err
		}
	}
	t := time.NewTimer(alone)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
	master.Kill()
	promoted := poll(ctx, nil, func() (bool, error) {
		addr, err := s.MasterAddr(ctx)
		if err != nil || addr != replica.Addr() {
			return false, nil
		}
		info, err := replica.ask(ctx, "INFO replication")
		return err == nil && strings.Contains(info, "role:master"), nil
	})
	// Also after an interrupt, so that what comes next finds both.
	back := context.WithoutCancel(ctx)
	if err := master.Restart(back, true); err != nil {
		return errors.Join(promoted, err)
	}
	return errors.Join(promoted, s.Follow(back, master))
}

// Follow gives a server that was restarted the part that the Sentinels see it in:
// its command line knows only the part it began with.
func (s *Sentinel) Follow(ctx context.Context, r *Redis) error {
	addr, err := s.MasterAddr(ctx)
	if err != nil {
		return err
	}
	command := "REPLICAOF NO ONE"
	if addr != r.Addr() {
		command = "REPLICAOF " + strings.Replace(addr, ":", " ", 1)
	}
	_, err = r.Do(ctx, command)
	return err
}
