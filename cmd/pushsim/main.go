// Command pushsim is a receiver to send to where no real one should be: it
// answers as FCM and as a relay do, in every way that they may answer, and logs
// exactly what arrived when.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := command().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "pushsim:", err)
		stop()
		os.Exit(exitCode(err))
	}
}

func command() *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use:   "pushsim",
		Short: "Simulate a receiver of push messages and log what arrives",
		Long: `pushsim answers FCM's POST /v1/projects/{project}/messages:send, POST /relay
(the relay protocol) and POST /status, and writes two lines of NDJSON a message
to --log: one when its request came in, one with the answer. It speaks HTTP/1.1
and HTTP/2 with prior knowledge on --listen, HTTP/2 over TLS on --tls-listen
with a certificate made at each start: callers trust the authority that --tls-ca
is given to write (for schoolbell: SSL_CERT_FILE). With --service-account FCM
wants an access token, which the account in that file gets from POST /token.
How it answers is set by flags, changed at run time by
PUT /_sim/behaviour, and asked for by single device tokens: a token
"unregistered-7" is always answered UNREGISTERED, "unavailable2-7" twice
UNAVAILABLE and then accepted.

Outcomes of a message (token prefix, probability in --outcomes):
  unregistered UNREGISTERED     unavailable UNAVAILABLE       internal INTERNAL
  quota QUOTA_EXCEEDED          mismatch SENDER_ID_MISMATCH   invalid INVALID_ARGUMENT
  thirdparty THIRD_PARTY_AUTH_ERROR                           strange STRANGE_ERROR
  missing MISSING (left out of the answer)                    duplicate DUPLICATE
  extra EXTRA (a stranger's result too)                       badstatus BAD_STATUS
Outcomes of a whole request:
  auth AUTH (401)               forbidden FORBIDDEN (403)     throttled THROTTLED (429)
  busy BUSY (503, Retry-After)  down DOWN (503)               error ERROR (500)
  redirect REDIRECT (307)       garbage GARBAGE (200, HTML)   hang HANG (no answer)
  reset RESET (not accepted)    loseanswer LOSE_ANSWER        truncated TRUNCATED
  cut CUT (accepted, then the whole connection is closed)
  goaway GOAWAY (accepted, and the connection is asked to end)
  falsealarm FALSE_ALARM (accepted, and 503 answered)
With FCM a request is one message, and errors have the bodies FCM documents.

GET /_sim/counts gives sums, GET /_sim/log (with --keep) all arrivals.
The log file is written anew at each start. SIGTERM ends it and writes it out.`,
		Example: `  pushsim --listen 127.0.0.1:9099 --log arrivals.ndjson --latency 80ms±40ms --outcomes UNREGISTERED=0.02,UNAVAILABLE=0.01
  pushsim --tls-listen 127.0.0.1:9443 --tls-ca ca.pem --service-account account.json
  curl -X PUT http://127.0.0.1:9099/_sim/behaviour -d '{"latency":"2s","reset":0.1}'`,
		Args:          cobra.NoArgs,
		SilenceErrors: true,
		SilenceUsage:  true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return run(cmd.Context(), o, cmd.ErrOrStderr())
		},
	}
	cmd.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	f := cmd.Flags()
	f.StringVar(&o.listen, "listen", "127.0.0.1:9099", "address to listen on; port 0 takes a free one")
	f.StringVar(&o.addrFile, "addr-file", "", "write the address to this file once it listens")
	f.StringVar(&o.tlsListen, "tls-listen", "", "address to listen on with TLS; empty: none")
	f.StringVar(&o.tlsAddrFile, "tls-addr-file", "", "write the TLS address to this file once it listens")
	f.StringVar(&o.tlsCA, "tls-ca", "", "write the authority behind the certificate to this file (PEM)")
	f.StringVar(&o.project, "project", "", "the only Firebase project there is; empty: any")
	f.StringVar(&o.account, "service-account", "", "write a service account to this file, and let only it send as FCM")
	f.StringVar(&o.log, "log", "", "write the arrival log to this file")
	f.BoolVar(&o.keep, "keep", false, "keep arrivals in memory, for GET /_sim/log")
	f.StringVar(&o.latency, "latency", "", "time until each answer, such as 80ms or 80ms±40ms (or 80ms+-40ms)")
	f.StringVar(&o.outcomes, "outcomes", "", "probabilities by code, such as UNREGISTERED=0.02,UNAVAILABLE=0.01")
	f.Float64Var(&o.reset, "reset", 0, "probability that a request is reset, not accepted")
	f.Float64Var(&o.loseAnswer, "lose-answer", 0, "probability that a request is accepted and its answer lost")
	f.IntVar(&o.quota, "quota", 0, "messages accepted in any 60 s of a relay and of FCM each, 429 beyond; 0: no bound")
	f.IntVar(&o.retryAfter, "retry-after", 1, "seconds in Retry-After")
	f.BoolVar(&o.dedupe, "dedupe", false, "drop repeats by message id, as a good relay does")
	f.StringVar(&o.token, "token", "", "bearer token to ask for; others get 401")
	f.Uint64Var(&o.seed, "seed", 1, "of everything left to chance")
	return cmd
}
