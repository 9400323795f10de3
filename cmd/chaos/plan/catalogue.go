// Package plan decides what a chaos run breaks, and when: from a seed, by
// arithmetic alone, so that the same seed breaks the same things at the same
// moments. It breaks nothing itself, knows no replica and looks at no clock.
package plan

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Kind is a kind of fault, as it is named on the command line.
type Kind string

// The kinds.
const (
	Kill           Kind = "kill"
	Pause          Kind = "pause"
	RedisFlush     Kind = "redis-flush"
	RedisRestart   Kind = "redis-restart"
	RedisPause     Kind = "redis-pause"
	RedisFailover  Kind = "redis-failover"
	PartitionRedis Kind = "partition-redis"
	PartitionDB    Kind = "partition-db"
	DBRestart      Kind = "db-restart"
	Clock          Kind = "clock"
)

// Way is one of the ways in which a kind of fault happens.
type Way string

// The ways, by kind.
const (
	Dies Way = "dies" // kill

	Stands Way = "stands" // pause

	FlushAll    Way = "all"     // redis-flush
	FlushScript Way = "scripts" //
	DropLock    Way = "lock"
	DropQuota   Way = "quota"

	KeepData Way = "with-data" // redis-restart
	LoseData Way = "without-data"

	ClientPause Way = "client-pause" // redis-pause
	StopServer  Way = "sigstop"

	Crash Way = "crash" // redis-failover

	Delay     Way = "delay" // partition-redis, partition-db
	BlackHole Way = "black-hole"
	Reset     Way = "reset"
	Swallow   Way = "swallow-reply"
	Stall     Way = "stall"
	Late      Way = "late"
	LateTwice Way = "late-twice" // partition-db

	FastStop      Way = "fast" // db-restart
	ImmediateStop Way = "immediate"
	Terminate     Way = "terminate"

	ReplicaForth Way = "replica+1h" // clock
	ReplicaBack  Way = "replica-1h"
	RedisForth   Way = "redis+1h"
	RedisBack    Way = "redis-1h"
)

// part is what a fault takes hold of; one part suffers one fault at a time.
type part int

const (
	aReplica part = iota
	theRedis
	theDatabase
)

// Entry says what a kind of fault is.
type Entry struct {
	Kind Kind
	Ways []Way
	What string // one sentence for people
	part part
}

// Catalogue lists all kinds, in the order in which they are explained.
func Catalogue() []Entry {
	return []Entry{
		{Kill, []Way{Dies}, "SIGKILL of the replica that holds the most work, or the next; it is started again a little later", aReplica},
		{Pause, []Way{Stands}, "SIGSTOP of a replica for two leases, then SIGCONT: it goes on believing what is no longer true", aReplica},
		{RedisFlush, []Way{FlushAll, FlushScript, DropLock, DropQuota}, "FLUSHALL, SCRIPT FLUSH, or DEL of one school's lock or quota", theRedis},
		{RedisRestart, []Way{KeepData, LoseData}, "redis-server is killed and comes back, with its data or without", theRedis},
		{RedisPause, []Way{ClientPause, StopServer}, "CLIENT PAUSE, or SIGSTOP of redis-server: connections stay, nobody answers", theRedis},
		{RedisFailover, []Way{Crash}, "the master dies with writes that its replica never got; Sentinel promotes the replica", theRedis},
		{PartitionRedis, []Way{BlackHole, Swallow, Delay, Reset, Stall, Late}, "one replica's way to Redis alone delays, swallows everything, resets, loses the answers to commands in a row, or delivers everything (stall), or what decides (late), when it is too late", aReplica},
		{PartitionDB, []Way{BlackHole, Swallow, Delay, Reset, Stall, Late, LateTwice}, "the same of one replica's way to PostgreSQL, where what comes too late are claims of batches; late-twice also loses the answers about them of Redis, so that they are given back again and again", aReplica},
		{DBRestart, []Way{ImmediateStop, Terminate, FastStop}, "PostgreSQL shuts down (immediate or fast) and comes back, or ends every session (pg_terminate_backend)", theDatabase},
		{Clock, []Way{RedisForth, ReplicaForth, RedisBack, ReplicaBack}, "the wall clock of one replica, or Redis's alone, steps an hour forth or back, and later the other way", theRedis},
	}
}

func entry(k Kind) (Entry, bool) {
	all := Catalogue()
	i := slices.IndexFunc(all, func(e Entry) bool { return e.Kind == k })
	if i < 0 {
		return Entry{}, false
	}
	return all[i], true
}

// Choice is a kind of fault that a run may suffer, in these ways.
type Choice struct {
	Kind Kind
	Ways []Way
}

// Has reports whether the kind is among the choices.
func Has(choices []Choice, k Kind) bool {
	return slices.ContainsFunc(choices, func(c Choice) bool { return c.Kind == k })
}

// Parse reads a list of kinds, each in all its ways or, as in "redis-flush/all",
// in one, such as "kill,redis-flush/all,redis-flush/lock"; or "all" or "none".
func Parse(list string) ([]Choice, error) {
	var known []string
	for _, e := range Catalogue() {
		known = append(known, string(e.Kind))
	}
	switch strings.TrimSpace(list) {
	case "all":
		list = strings.Join(known, ",")
	case "none":
		return nil, nil
	}
	var choices []Choice
	for name := range strings.SplitSeq(list, ",") {
		kind, way, one := strings.Cut(strings.TrimSpace(name), "/")
		e, ok := entry(Kind(kind))
		if !ok {
			return nil, fmt.Errorf("fault %q is none of %s, all, none", name, strings.Join(known, ", "))
		}
		ways := e.Ways
		if one {
			if ways = []Way{Way(way)}; !slices.Contains(e.Ways, ways[0]) {
				return nil, fmt.Errorf("fault %q: %s happens as %s", name, kind, join(e.Ways))
			}
		}
		i := slices.IndexFunc(choices, func(c Choice) bool { return c.Kind == e.Kind })
		if i < 0 {
			choices = append(choices, Choice{Kind: e.Kind})
			i = len(choices) - 1
		}
		for _, w := range ways {
			if !slices.Contains(choices[i].Ways, w) {
				choices[i].Ways = append(choices[i].Ways, w)
			}
		}
	}
	return choices, nil
}

func join(ways []Way) string {
	var names []string
	for _, w := range ways {
		names = append(names, string(w))
	}
	return strings.Join(names, ", ")
}

// touches is what the fault takes hold of, which for some ways differs from the
// kind's.
func (e Entry) touches(w Way) part {
	if w == ReplicaForth || w == ReplicaBack {
		return aReplica
	}
	return e.part
}

// aftermath is how long a part is busy with a fault after it was mended.
func aftermath(k Kind) time.Duration {
	if k == RedisFailover {
		return 5 * time.Second // until Sentinel has found out and the other is promoted
	}
	return time.Second
}

// holds is how long a fault of that kind lasts: at least, at most.
func holds(k Kind, w Way, lease time.Duration) (least, most time.Duration) {
	switch k {
	case Kill:
		return time.Second, 3 * time.Second // until it is started again
	case Pause:
		return 2 * lease, 2 * lease
	case RedisRestart, DBRestart:
		return 0, 2 * time.Second // down
	case RedisPause:
		return time.Second, lease + time.Second
	case RedisFailover:
		return 300 * time.Millisecond, 1500 * time.Millisecond // how much is lost
	case PartitionRedis, PartitionDB:
		if w == Swallow {
			return 2 * time.Second, 4 * time.Second // until a request came by
		}
		if w == Stall || w == Late || w == LateTwice {
			return lease, 2 * lease // what is held back comes when another has the school
		}
		return 2 * time.Second, lease + 2*time.Second
	case Clock:
		return 3 * time.Second, lease + 2*time.Second
	}
	return 0, 0
}
