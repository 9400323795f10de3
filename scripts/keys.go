package scripts

import (
	"fmt"
	"strings"
)

// Keys builds the names of Redis keys under one prefix. What belongs to one
// school carries the school's id as hash tag, so that it stays on one slot of
// a Redis Cluster (R17).
type Keys struct{ prefix string }

// NewKeys returns the builders for prefix. The prefix may not be empty and may
// not hold braces or white space: a brace would move the hash tag and spread
// one school's keys over slots.
func NewKeys(prefix string) (Keys, error) {
	if prefix == "" || strings.ContainsAny(prefix, "{} \t\r\n") {
		return Keys{}, fmt.Errorf("redis prefix %q: must be non-empty, without braces and white space", prefix)
	}
	return Keys{prefix: prefix}, nil
}

// Lock is the hash that says who holds the school until when; its TTL is the lease.
func (k Keys) Lock(school string) string { return k.prefix + ":{" + school + "}:lock" }

// Quota is the hash that says how much of the cycle is used and when the school may go on.
func (k Keys) Quota(school string) string { return k.prefix + ":{" + school + "}:quota" }

// Wake is the channel that carries ids of schools just given work; a hint, never the truth.
func (k Keys) Wake() string { return k.prefix + ":wake" }

// Replica is the hash with which one replica says that it lives; its TTL ends with the heartbeat.
func (k Keys) Replica(instance string) string { return k.prefix + ":replica:" + instance }

// Replicas is the sorted set of instance ids by last heartbeat, so that nobody
// has to scan the key space to list the members.
func (k Keys) Replicas() string { return k.prefix + ":replicas" }

// Rate is the hash that says how much of a sender's rate is there, who waits for it,
// and whether the sender is stopped. A colon stands in no school's id, so that no
// school has this key.
func (k Keys) Rate(sender string) string { return k.prefix + ":{sender:" + sender + "}:rate" }

// Job is the slot of one cluster-wide job: taken once, never given back.
func (k Keys) Job(name, slot string) string { return k.prefix + ":job:" + name + ":" + slot }
