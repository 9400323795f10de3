package api

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
)

// Upload hands in a notice with up to 1,000,000 recipients, encoded as they are
// taken from the sequence, so that they are never all in memory. An error from
// the sequence breaks the upload off; the server keeps nothing of it then.
//
// The sequence runs in a goroutine that has ended when Upload returns.
func (c *Client) Upload(ctx context.Context, n NoticeRequest, recipients iter.Seq2[Recipient, error], idempotencyKey string) (Accepted, error) {
	if len(n.Recipients) > 0 {
		return Accepted{}, &Error{Code: InvalidArgument, Field: "recipients", Message: "give them as the sequence"}
	}
	pr, pw := io.Pipe()
	encoded := make(chan error, 1)
	go func() {
		err := encode(pw, n, recipients)
		_ = pw.CloseWithError(err) // nil ends the body properly
		encoded <- err
	}()
	out, err := c.UploadFrom(ctx, pr, idempotencyKey)
	_ = pr.CloseWithError(errUploadEnded) // a refused upload: the encoder stops at its next write
	encodeErr := <-encoded
	if err != nil && encodeErr != nil && !errors.Is(encodeErr, errUploadEnded) && !errors.Is(encodeErr, io.ErrClosedPipe) {
		return out, fmt.Errorf("upload notice of school %s: %w", n.School, encodeErr)
	}
	return out, err
}

var errUploadEnded = errors.New("the upload has ended")

func encode(w io.Writer, n NoticeRequest, recipients iter.Seq2[Recipient, error]) error {
	buf := bufio.NewWriterSize(w, 64<<10)
	enc := json.NewEncoder(buf) // a line a value
	enc.SetEscapeHTML(false)
	if err := enc.Encode(n); err != nil {
		return err
	}
	for r, err := range recipients {
		if err != nil {
			return err
		}
		if err := enc.Encode(r); err != nil {
			return err
		}
	}
	return buf.Flush()
}

// UploadFrom hands in NDJSON as it stands: the notice in the first line, then
// one recipient a line of at most 64 KiB.
func (c *Client) UploadFrom(ctx context.Context, ndjson io.Reader, idempotencyKey string) (Accepted, error) {
	h := http.Header{"Content-Type": {NDJSON}}
	setKey(h, idempotencyKey)
	var out Accepted
	err := c.call(ctx, http.MethodPost, "/v1/notices", nil, h, ndjson, &out)
	return out, err
}
