package relay

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"strconv"
	"time"

	"schoolbell/sender"
)

var (
	errCallTimeout = errors.New("the call took longer than call_timeout")
	errReadTimeout = errors.New("the relay was silent for read_timeout")
	errTooLarge    = errors.New("the answer is larger than its bound")
)

// call is one exchange with the relay and the reason for which it was cut short.
type call struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	stop   context.CancelFunc
}

func newCall(ctx context.Context, longest time.Duration) *call {
	ctx, stop := context.WithTimeoutCause(ctx, longest, errCallTimeout)
	ctx, cancel := context.WithCancelCause(ctx)
	return &call{ctx: ctx, cancel: cancel, stop: stop}
}

func (c *call) end() {
	c.cancel(nil)
	c.stop()
}

// read reads an answer up to limit bytes, giving up when the relay falls silent
// for longer than silence: the transport's own timeout ends with the head.
func (c *call) read(body io.Reader, limit int64, silence time.Duration) ([]byte, error) {
	timer := time.AfterFunc(silence, func() { c.cancel(errReadTimeout) })
	defer timer.Stop()
	answer, err := io.ReadAll(io.LimitReader(resetOnRead{body, timer, silence}, limit+1))
	if err != nil {
		return nil, err
	}
	if int64(len(answer)) > limit {
		return nil, errTooLarge
	}
	return answer, nil
}

type resetOnRead struct {
	from    io.Reader
	timer   *time.Timer
	silence time.Duration
}

func (r resetOnRead) Read(p []byte) (int, error) {
	n, err := r.from.Read(p)
	if n > 0 {
		r.timer.Reset(r.silence)
	}
	return n, err
}

// notSent classifies a failure before anything left.
func (c *call) notSent(err error) sender.Result {
	r := sender.Result{Class: sender.NotSent, Code: sender.CodeConnectFailed}
	var (
		dns    *net.DNSError
		op     *net.OpError
		cert   *tls.CertificateVerificationError
		record tls.RecordHeaderError
	)
	cause := context.Cause(c.ctx)
	switch {
	case errors.Is(cause, errCallTimeout), errors.Is(cause, context.DeadlineExceeded):
		r.Code = sender.CodeConnectTimeout
	case cause != nil:
		r.Code = sender.CodeCancelled
	case errors.As(err, &dns):
		r.Code = sender.CodeDNSFailed
	case errors.As(err, &cert), errors.As(err, &record), errors.As(err, &op) && tlsAlert(op):
		r.Code, r.Detail = sender.CodeTLSFailed, "no trusted connection to the relay"
	case isTimeout(err):
		r.Code = sender.CodeConnectTimeout
	case errors.As(err, &op) && op.Op == "proxyconnect":
		r.Detail = "no connection through the proxy"
	}
	return r
}

// unanswered classifies a failure after something may have left.
func (c *call) unanswered(err error) sender.Result {
	r := sender.Result{Class: sender.Unknown, Code: sender.CodeNoAnswer}
	cause := context.Cause(c.ctx)
	switch {
	case errors.Is(err, errTooLarge):
		r.Code, r.Detail = sender.CodeBadAnswer, errTooLarge.Error()
	case errors.Is(cause, errReadTimeout):
		r.Code = sender.CodeReadTimeout
	case errors.Is(cause, errCallTimeout), errors.Is(cause, context.DeadlineExceeded):
		r.Code = sender.CodeCallTimeout
	case cause != nil:
		r.Code = sender.CodeCancelled
	case isTimeout(err):
		r.Code = sender.CodeReadTimeout // the transport's own: no head in time
	}
	return r
}

// tlsAlert recognises an alert in a handshake, whose type crypto/tls keeps to
// itself, by the operation that it names.
func tlsAlert(op *net.OpError) bool { return op.Op == "remote error" || op.Op == "local error" }

func isTimeout(err error) bool {
	var t net.Error
	return errors.As(err, &t) && t.Timeout()
}

func httpCode(status int) string { return "HTTP_" + strconv.Itoa(status) }
