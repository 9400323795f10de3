package api

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// MIME types of the bodies that the API takes.
const (
	JSON   = "application/json"
	NDJSON = "application/x-ndjson"
)

// maxAnswer bounds what the client reads of one answer: a page of 1,000 rows is
// far below it.
const maxAnswer = 32 << 20

// Client calls the API. Its fields are set before its first use and not
// changed after; it is safe for concurrent use.
//
// Every method returns an [*Error] for an answer that refuses, and the wrapped
// transport error where no answer came. Nothing is retried: with an
// idempotency key a caller can repeat a call whose answer it did not get.
type Client struct {
	BaseURL string       // e.g. http://127.0.0.1:8080
	Key     string       // API key; empty sends none
	HTTP    *http.Client // nil: http.DefaultClient
}

// Send hands in a notice with its recipients in one JSON body of at most 8 MiB.
// An empty idempotency key sends none.
func (c *Client) Send(ctx context.Context, n NoticeRequest, idempotencyKey string) (Accepted, error) {
	var out Accepted
	body, err := json.Marshal(n)
	if err != nil {
		return out, fmt.Errorf("send notice of school %s: %w", n.School, err)
	}
	h := http.Header{"Content-Type": {JSON}}
	setKey(h, idempotencyKey)
	err = c.call(ctx, http.MethodPost, "/v1/notices", nil, h, bytes.NewReader(body), &out)
	return out, err
}

// Notice reads one notice. Code NotFound where there is none.
func (c *Client) Notice(ctx context.Context, id string) (Notice, error) {
	var out Notice
	err := c.get(ctx, "/v1/notices/"+url.PathEscape(id), nil, &out)
	return out, err
}

// Cancel closes a notice: nothing of it is sent that is not on the way already.
// Cancelled already: no error. Code Conflict for one that has ended or expired.
func (c *Client) Cancel(ctx context.Context, id string) (Notice, error) {
	var out Notice
	err := c.call(ctx, http.MethodPost, "/v1/notices/"+url.PathEscape(id)+"/cancel", nil, nil, nil, &out)
	return out, err
}

// Retry puts a notice's permanent failures back, due at once, but for those that may
// have arrived where it asks for at most once. Code Conflict for a notice that was
// cancelled, has expired or was purged. Where Next is not empty it goes on if it is
// called again.
func (c *Client) Retry(ctx context.Context, id string) (Requeued, error) {
	var out Requeued
	err := c.call(ctx, http.MethodPost, "/v1/notices/"+url.PathEscape(id)+"/retry", nil, nil, nil, &out)
	return out, err
}

// FailureQuery selects permanent failures.
type FailureQuery struct {
	Page
	School string // empty: all
	Notice string // empty: all
	Code   string // an error code or a reason; empty: all
}

// Failures lists permanent failures in groups, newest notices first. A page may be
// short although Next is not empty.
func (c *Client) Failures(ctx context.Context, q FailureQuery) (List[Failure], error) {
	v := q.query()
	set(v, "school", q.School)
	set(v, "notice", q.Notice)
	set(v, "code", q.Code)
	var out List[Failure]
	err := c.get(ctx, "/v1/failures", v, &out)
	return out, err
}

// Requeue puts permanent failures back, due at once, a bounded number a call: until
// Next is empty the rest is asked for with it as Cursor.
func (c *Client) Requeue(ctx context.Context, r RequeueRequest) (Requeued, error) {
	var out Requeued
	body, err := json.Marshal(r)
	if err != nil {
		return out, fmt.Errorf("requeue: %w", err)
	}
	err = c.call(ctx, http.MethodPost, "/v1/failures/requeue", nil, http.Header{"Content-Type": {JSON}}, bytes.NewReader(body), &out)
	return out, err
}

// Page asks for part of a list.
type Page struct {
	Cursor string // Next of the page before; empty: the first
	Limit  int    // 1 … 1000; 0: the server's default, 100
}

func (p Page) query() url.Values {
	q := url.Values{}
	set(q, "cursor", p.Cursor)
	if p.Limit != 0 {
		q.Set("limit", strconv.Itoa(p.Limit))
	}
	return q
}

// NoticeQuery selects notices, newest first.
type NoticeQuery struct {
	Page
	School string // empty: all
	Status string // empty: all
}

// Notices lists notices, newest first.
func (c *Client) Notices(ctx context.Context, q NoticeQuery) (List[Notice], error) {
	v := q.query()
	set(v, "school", q.School)
	set(v, "status", q.Status)
	var out List[Notice]
	err := c.get(ctx, "/v1/notices", v, &out)
	return out, err
}

// RecipientQuery selects recipients of one notice.
type RecipientQuery struct {
	Page
	State string // empty: all
	Error string // an error code, e.g. UNREGISTERED; empty: all
}

// Recipients lists a notice's recipients in order of seq.
func (c *Client) Recipients(ctx context.Context, notice string, q RecipientQuery) (RecipientList, error) {
	v := q.query()
	set(v, "state", q.State)
	set(v, "error", q.Error)
	var out RecipientList
	err := c.get(ctx, "/v1/notices/"+url.PathEscape(notice)+"/recipients", v, &out)
	return out, err
}

// PutSchool creates a school or changes the fields given.
func (c *Client) PutSchool(ctx context.Context, id string, change SchoolChange) (School, error) {
	var out School
	body, err := json.Marshal(change)
	if err != nil {
		return out, fmt.Errorf("put school %s: %w", id, err)
	}
	err = c.call(ctx, http.MethodPut, "/v1/schools/"+url.PathEscape(id), nil, http.Header{"Content-Type": {JSON}}, bytes.NewReader(body), &out)
	return out, err
}

// PauseSchool stops a school: nothing of it is claimed after the answer. What is on
// the way gets its outcome. Paused already: no error.
func (c *Client) PauseSchool(ctx context.Context, id string) (School, error) {
	return c.setPaused(ctx, id, "pause")
}

// ResumeSchool lets a paused school go on at once.
func (c *Client) ResumeSchool(ctx context.Context, id string) (School, error) {
	return c.setPaused(ctx, id, "resume")
}

func (c *Client) setPaused(ctx context.Context, id, what string) (School, error) {
	var out School
	err := c.call(ctx, http.MethodPost, "/v1/schools/"+url.PathEscape(id)+"/"+what, nil, nil, nil, &out)
	return out, err
}

// School reads one school. Code NotFound where there is none.
func (c *Client) School(ctx context.Context, id string) (School, error) {
	var out School
	err := c.get(ctx, "/v1/schools/"+url.PathEscape(id), nil, &out)
	return out, err
}

// Schools lists schools by id.
func (c *Client) Schools(ctx context.Context, p Page) (List[School], error) {
	var out List[School]
	err := c.get(ctx, "/v1/schools", p.query(), &out)
	return out, err
}

// PutDevices registers up to 1,000 devices of a school in one JSON body, or
// changes them. To repeat it is harmless.
func (c *Client) PutDevices(ctx context.Context, school string, devices []NewDevice) (Registered, error) {
	var out Registered
	body, err := json.Marshal(DevicesRequest{Devices: devices})
	if err != nil {
		return out, fmt.Errorf("put devices of school %s: %w", school, err)
	}
	err = c.call(ctx, http.MethodPut, devicesOf(school), nil, http.Header{"Content-Type": {JSON}}, bytes.NewReader(body), &out)
	return out, err
}

// DeleteDevice removes a device from a school's registry. Code NotFound where
// there is none.
func (c *Client) DeleteDevice(ctx context.Context, school, token string) error {
	var out DeletedDevice
	err := c.call(ctx, http.MethodDelete, devicesOf(school)+"/"+url.PathEscape(token), nil, nil, nil, &out)
	if e, ok := errors.AsType[*url.Error](err); ok { // it and what wraps it quote the path, and so the token
		e.URL = strings.TrimRight(c.BaseURL, "/") + devicesOf(school)
		return fmt.Errorf("delete device of school %s: %w", school, e)
	}
	return err
}

func devicesOf(school string) string { return "/v1/schools/" + url.PathEscape(school) + "/devices" }

// DeviceQuery selects devices of one school.
type DeviceQuery struct {
	Page
	Topic   string // empty: all
	Retired string // true, false; empty: all
}

// Devices lists a school's devices. Code NotFound for an unknown school.
func (c *Client) Devices(ctx context.Context, school string, q DeviceQuery) (List[Device], error) {
	v := q.query()
	set(v, "topic", q.Topic)
	set(v, "retired", q.Retired)
	var out List[Device]
	err := c.get(ctx, devicesOf(school), v, &out)
	return out, err
}

// BrakeQuery selects brakes, newest first.
type BrakeQuery struct {
	Page
	School string // empty: all
	Open   bool   // only those that are on
}

// Brakes lists brakes, newest first.
func (c *Client) Brakes(ctx context.Context, q BrakeQuery) (List[Brake], error) {
	v := q.query()
	set(v, "school", q.School)
	if q.Open {
		v.Set("open", "true")
	}
	var out List[Brake]
	err := c.get(ctx, "/v1/brakes", v, &out)
	return out, err
}

// ConfirmBrake retires the devices that a brake flagged. Code NotFound where there
// is none, Conflict where it was cleared.
func (c *Client) ConfirmBrake(ctx context.Context, id string) (Brake, error) {
	return c.closeBrake(ctx, id, "confirm")
}

// ClearBrake removes a brake's flags and retires nothing. Code NotFound where
// there is none, Conflict where it was confirmed.
func (c *Client) ClearBrake(ctx context.Context, id string) (Brake, error) {
	return c.closeBrake(ctx, id, "clear")
}

func (c *Client) closeBrake(ctx context.Context, id, how string) (Brake, error) {
	var out Brake
	err := c.call(ctx, http.MethodPost, "/v1/brakes/"+url.PathEscape(id)+"/"+how, nil, nil, nil, &out)
	return out, err
}

// Cluster lists replicas and senders.
func (c *Client) Cluster(ctx context.Context) (Cluster, error) {
	var out Cluster
	err := c.get(ctx, "/v1/cluster", nil, &out)
	return out, err
}

// Ready asks whether the replica can accept notices. A replica that answers
// that it cannot is no error: Ready.Ready is false.
func (c *Client) Ready(ctx context.Context) (Ready, error) {
	var out Ready
	req, err := c.request(ctx, http.MethodGet, "/readyz", nil, nil, nil)
	if err != nil {
		return out, err
	}
	resp, err := c.http().Do(req)
	if err != nil {
		return out, fmt.Errorf("GET /readyz: %w", err)
	}
	defer drain(resp.Body)
	if resp.StatusCode == http.StatusOK || resp.StatusCode == http.StatusServiceUnavailable {
		if err := decode(resp.Body, &out); err == nil && out.Checks != nil {
			return out, nil
		}
	}
	return out, readError(resp)
}

// Version asks for the server's version.
func (c *Client) Version(ctx context.Context) (Version, error) {
	var out Version
	err := c.get(ctx, "/version", nil, &out)
	return out, err
}

func (c *Client) get(ctx context.Context, path string, q url.Values, out any) error {
	return c.call(ctx, http.MethodGet, path, q, nil, nil, out)
}

func (c *Client) call(ctx context.Context, method, path string, q url.Values, h http.Header, body io.Reader, out any) error {
	req, err := c.request(ctx, method, path, q, h, body)
	if err != nil {
		return err
	}
	resp, err := c.http().Do(req)
	if err != nil {
		return fmt.Errorf("%s %s: %w", method, path, err)
	}
	defer drain(resp.Body)
	if resp.StatusCode < 200 || resp.StatusCode > 299 {
		return readError(resp)
	}
	if err := decode(resp.Body, out); err != nil {
		return fmt.Errorf("%s %s: read the answer: %w", method, path, err)
	}
	return nil
}

func (c *Client) request(ctx context.Context, method, path string, q url.Values, h http.Header, body io.Reader) (*http.Request, error) {
	target := strings.TrimRight(c.BaseURL, "/") + path
	if len(q) > 0 {
		target += "?" + q.Encode()
	}
	req, err := http.NewRequestWithContext(ctx, method, target, body)
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", method, path, err)
	}
	for k, v := range h {
		req.Header[k] = v
	}
	req.Header.Set("Accept", JSON)
	if c.Key != "" {
		req.Header.Set("Authorization", "Bearer "+c.Key)
	}
	return req, nil
}

func (c *Client) http() *http.Client {
	if c.HTTP != nil {
		return c.HTTP
	}
	return http.DefaultClient
}

// readError makes an *Error of an answer, also of one that something between
// client and server wrote.
func readError(resp *http.Response) error {
	e := &Error{}
	var body ErrorBody
	ours, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	if ours == JSON && decode(resp.Body, &body) == nil && body.Error.Code != "" {
		*e = body.Error
	} else {
		e.Code = codeOf(resp.StatusCode)
		e.Message = "the answer was not schoolbell's: " + resp.Status
	}
	e.Status = resp.StatusCode
	if e.RequestID == "" {
		e.RequestID = resp.Header.Get("X-Request-Id")
	}
	e.RetryAfter = retryAfter(resp.Header.Get("Retry-After"))
	return e
}

// retryAfter reads whole seconds; schoolbell sends no dates, and a date of
// something in between would be read against the wrong clock.
func retryAfter(s string) time.Duration {
	n, err := strconv.Atoi(s)
	if err != nil || n < 0 || n > 24*60*60 {
		return 0
	}
	return time.Duration(n) * time.Second
}

func decode(r io.Reader, out any) error {
	dec := json.NewDecoder(io.LimitReader(r, maxAnswer))
	if err := dec.Decode(out); err != nil {
		if errors.Is(err, io.EOF) {
			return io.ErrUnexpectedEOF
		}
		return err
	}
	return nil
}

// drain reads what little is left, so that the connection is used again.
func drain(body io.ReadCloser) {
	_, _ = io.CopyN(io.Discard, body, 64<<10)
	_ = body.Close()
}

func setKey(h http.Header, idempotencyKey string) {
	if idempotencyKey != "" {
		h.Set("Idempotency-Key", idempotencyKey)
	}
}

func set(q url.Values, name, value string) {
	if value != "" {
		q.Set(name, value)
	}
}
