package arena

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"time"

	"schoolbell/deploy/local"
	"schoolbell/sender/simulator/verdict"
)

// Way is one replica's own way to a store, which may have several servers: what
// is done to it, no other replica feels.
type Way struct {
	replica string
	kind    string            // of its faults in the verdict
	through map[string]string // a server's address → the proxy's before it
	proxies []*local.Proxy
}

func newWay(replica, kind string, servers ...string) (w *Way, err error) {
	w = &Way{replica: replica, kind: kind, through: map[string]string{}}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.close())
		}
	}()
	for _, addr := range servers {
		p, err := local.StartProxy(addr)
		if err != nil {
			return w, err
		}
		w.proxies = append(w.proxies, p)
		w.through[addr] = p.Addr()
	}
	if len(servers) > 1 {
		// They tell their clients of one another.
		for _, p := range w.proxies {
			p.Rewrite(w.redirect)
		}
	}
	return w, nil
}

// told is how Redis, its Sentinels and its Cluster write an address: in one
// string, as two strings, as a string and a number, or by name. The ports of
// private servers all have five digits, so that lengths stay what they are.
var told = regexp.MustCompile(`127\.0\.0\.1(?:\r\n\$4\r\nport\r\n\$5\r\n|\r\n\$5\r\n|\r\n:|[ :,])\d{5}`)

// redirect writes the proxies' addresses over those of the servers.
func (w *Way) redirect(reply []byte) []byte {
	return told.ReplaceAllFunc(reply, func(match []byte) []byte {
		head, port := match[:len(match)-5], string(match[len(match)-5:])
		if to, ok := w.through["127.0.0.1:"+port]; ok {
			_, port, _ = strings.Cut(to, ":")
		}
		return append(append([]byte{}, head...), port...)
	})
}

// url is the URL with the address of each server replaced by its proxy's.
func (w *Way) url(raw string) string {
	var pairs []string
	for from, to := range w.through {
		pairs = append(pairs, from, to)
	}
	return strings.NewReplacer(pairs...).Replace(raw)
}

func (w *Way) each(f func(*local.Proxy) error) error {
	var errs []error
	for _, p := range w.proxies {
		errs = append(errs, f(p))
	}
	return errors.Join(errs...)
}

func (w *Way) close() error { return w.each((*local.Proxy).Close) }

// Break does something to the way, for that long or until ctx ends, and mends it.
func (w *Way) Break(ctx context.Context, a *Arena, how string, hold time.Duration) error {
	f := verdict.Fault{At: time.Now(), Kind: w.kind, Target: w.replica, Detail: how}
	var err error
	switch how {
	case "delay":
		err = w.each(func(p *local.Proxy) error { return p.Delay(150*time.Millisecond, 100*time.Millisecond) })
	case "black-hole":
		err = w.each((*local.Proxy).BlackHole)
	case "reset":
		err = w.each((*local.Proxy).Reset)
	case "late":
		_ = w.each(func(p *local.Proxy) error { p.HoldRequest(w.decides, many); return nil })
	case "stall":
		err = w.each((*local.Proxy).Stall)
	case "swallow-reply":
		_ = w.each(func(p *local.Proxy) error { p.SwallowReply(isWork, w.swallows()); return nil })
	default:
		err = fmt.Errorf("break the way to a store: %q is no way to do it", how)
	}
	if err == nil {
		wait(ctx, hold)
	}
	f.Until = time.Now()
	a.note(f)
	return errors.Join(err, w.each((*local.Proxy).Pass))
}

// BreakTwice makes the replica's claims come too late and, at the same time, loses
// Redis's answers about what it gives back because of that. It is noted as a fault
// of the way to the database.
func (r *Replica) BreakTwice(ctx context.Context, hold time.Duration) error {
	_ = r.ToRedis.each(func(p *local.Proxy) error { p.SwallowReply(givesBack, many); return nil })
	err := r.ToPostgres.Break(ctx, r.arena, "late", hold)
	return errors.Join(err, r.ToRedis.each((*local.Proxy).Pass))
}

// many is more than there will be.
const many = 1000

// givesBack matches the script that is told what became of attempts: of those that
// look at the quota and not at the lock, the one with three arguments.
func givesBack(request []byte) bool {
	has := func(text string) bool { return local.RequestContains(text)(request) }
	return bytes.HasPrefix(request, []byte("*7\r\n")) && has("EVALSHA") && has(":quota") && !has(":lock")
}

// swallows is how many answers in a row get lost. A script of Redis is tried again
// by the client, up to four times, and all of them are executed; so that a step
// fails after it was done several times, more have to be lost. A claim or a record
// is tried again by its owner.
func (w *Way) swallows() int {
	if w.kind == verdict.PartitionDB {
		return 2
	}
	return 20
}

// isWork matches requests that change something: scripts of Redis, and those of
// PostgreSQL that carry values (claims and records; a ping and BEGIN are short).
func isWork(request []byte) bool {
	return local.RequestContains("EVALSHA")(request) || len(request) > 200
}

// decides matches what must not count when it comes late: a script of Redis, or
// the claim of a batch, which of all that is said to PostgreSQL names the sender.
func (w *Way) decides(request []byte) bool {
	if w.kind == verdict.PartitionDB {
		return local.RequestContains("relay")(request)
	}
	return local.RequestContains("EVALSHA")(request)
}

// wait returns after that long, or when ctx ends.
func wait(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
