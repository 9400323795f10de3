SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -ec
.DEFAULT_GOAL := build

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null)
COMMIT  ?= $(shell git rev-parse HEAD 2>/dev/null)

# A test that takes this many seconds says so.
SLOW ?= 5
# The whole suite starts hundreds of private servers; a hang should still end.
TIMEOUT ?= 28m
PACKAGES ?= ./...
# Linters are pinned, so that a release of theirs breaks no build of ours. Not in
# go.mod: their dependencies would become ours.
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2

# Seeds and length of the chaos runs, which take about twice their length each.
SEEDS ?= 1 2 3 4 5
FOR ?= 3m
MUTATIONS ?= no-provisional-rest no-ledger-floors lease-end-after-call settle-twice claim-unfenced

.PHONY: build test acceptance mix retention chaos mutations model test-deps vet lint fmt clean

## build: the program, in ./bin
build:
	CGO_ENABLED=0 go build -trimpath -ldflags "-s -w -X main.version=$(VERSION) -X main.commit=$(COMMIT)" -o bin/schoolbell ./cmd/schoolbell

## test: everything, with the race detector; installs what is missing
test: test-deps vet
	go test -json -race -shuffle=on -timeout $(TIMEOUT) $(PACKAGES) | awk -v slow=$(SLOW) -f deploy/test-report.awk

## acceptance: the FCM scenario at full size, about a minute
acceptance: test-deps
	go test -count=1 -v -run TestFCMWithAKilledOwner ./cmd/chaos/arena -args -full

## mix: 100,000 recipients while FCM answers with all that it documents and loses
## some answers, judged answer by answer, about two minutes
mix: test-deps
	go test -count=1 -v -timeout 15m -run TestTheMix ./cmd/chaos/arena -args -full

## retention: what sending feels while 5,000,000 old recipients are removed, for four
## minutes at most, in one run, eight to ten minutes and some GB of disk
RETAINED ?= 5000000
retention: test-deps
	go test -count=1 -v -timeout 25m -run '^$$' -bench BenchmarkRetention -benchtime 1x ./cmd/chaos/arena -args -retained $(RETAINED)

## chaos: what Redis may do, on a Cluster, behind Sentinel and alone, and a process
## killed at every point of a turn, about five minutes; then all faults, one run a seed, about four minutes each
chaos: test-deps
	go test -count=1 -run 'WhileSchoolsSend|WhileTheirSchoolsSend|RedisClockAlone|PostgresRestarts|KilledAtEveryPoint' ./cmd/chaos/arena -args -full
	go build -o bin/chaos ./cmd/chaos
	failed=; for seed in $(SEEDS); do bin/chaos --seed $$seed --for $(FOR) --faults all || failed="$$failed $$seed"; done; \
	[ -z "$$failed" ] || { echo "broken with seed$$failed"; exit 1; }

## mutations: five defects on purpose, each of which its test and a chaos run have to
## find, about ten minutes
mutations: test-deps
	go test -count=1 -tags mutations -run Mutation ./watchdog ./school/quota/redisquota ./school/store ./coordinator/node/...
	go build -o bin/chaos ./cmd/chaos
	missed=; for m in $(MUTATIONS); do code=0; bin/chaos --mutate $$m --for 1m || code=$$?; [ $$code -eq 1 ] || missed="$$missed $$m"; done; \
	[ -z "$$missed" ] || { echo "not found:$$missed"; exit 1; }

## model: every state of a school's turn within the whole bounds, half a minute
model:
	go test -count=1 -v -run TestProtocol ./coordinator/model -args -full

test-deps:
	./deploy/install-test-deps.sh

vet:
	go vet $(PACKAGES)

## lint: form and static analysis. staticcheck's own checks find bugs and dead
## code and few matters of taste; which package may import which is a test
## (cmd/schoolbell/layout_test.go), so that it needs no linter.
lint: vet
	@unformatted=$$(gofmt -l .); [ -z "$$unformatted" ] || { echo "not formatted, run make fmt:"; echo "$$unformatted"; exit 1; }
	go run $(STATICCHECK) $(PACKAGES)

fmt:
	gofmt -w .

clean:
	rm -rf bin
