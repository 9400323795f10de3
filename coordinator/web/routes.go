package web

import (
	"context"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/go-chi/chi/v5"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"schoolbell/coordinator/api"
	"schoolbell/school"
)

// route is one call of the API.
type route struct {
	method  string
	pattern string
	role    Role // one of these is needed; open: no key
	quiet   bool // logged at debug
	handler http.Handler
}

// routes lists every call there is.
func (s *Server) routes() []route {
	operations := open
	if s.cfg.OperationsNeedKey {
		operations = Read
	}
	metrics := promhttp.HandlerFor(s.deps.Gatherer, promhttp.HandlerOpts{})
	return []route{
		{http.MethodPost, "/v1/notices", Ingest, false, endpoint(s, s.decodeSubmission, s.acceptNotice)},
		{http.MethodGet, "/v1/notices", Read, false, endpoint(s, decodeNoticeFilter, s.listNotices)},
		{http.MethodGet, "/v1/notices/{id}", Read, false, endpoint(s, decodeNoticeID, s.getNotice)},
		{http.MethodGet, "/v1/notices/{id}/recipients", Read, false, endpoint(s, decodeRecipientFilter, s.listRecipients)},
		{http.MethodPost, "/v1/notices/{id}/cancel", Ingest, false, endpoint(s, decodeNoticeID, s.cancelNotice)},
		{http.MethodPost, "/v1/notices/{id}/retry", Ingest, false, endpoint(s, decodeNoticeID, s.retryNotice)},
		{http.MethodGet, "/v1/failures", Read, false, endpoint(s, decodeFailureFilter, s.listFailures)},
		{http.MethodPost, "/v1/failures/requeue", Admin, false, endpoint(s, s.decodeRequeue, s.requeue)},
		{http.MethodPut, "/v1/schools/{id}", Admin, false, endpoint(s, s.decodeSchoolChange, s.putSchool)},
		{http.MethodGet, "/v1/schools/{id}", Read, false, endpoint(s, decodeSchoolID, s.getSchool)},
		{http.MethodPost, "/v1/schools/{id}/pause", Admin, false, endpoint(s, decodeSchoolID, s.pauseSchool)},
		{http.MethodPost, "/v1/schools/{id}/resume", Admin, false, endpoint(s, decodeSchoolID, s.resumeSchool)},
		{http.MethodGet, "/v1/schools", Read, false, endpoint(s, decodeSchoolPage, s.listSchools)},
		{http.MethodPut, "/v1/schools/{id}/devices", Ingest, false, endpoint(s, s.decodeRegistration, s.putDevices)},
		{http.MethodGet, "/v1/schools/{id}/devices", Read, false, endpoint(s, decodeDeviceFilter, s.listDevices)},
		{http.MethodDelete, "/v1/schools/{id}/devices/{token}", Ingest, false, endpoint(s, decodeDeviceToken, s.deleteDevice)},
		{http.MethodGet, "/v1/brakes", Read, false, endpoint(s, decodeBrakeFilter, s.listBrakes)},
		{http.MethodPost, "/v1/brakes/{id}/confirm", Admin, false, endpoint(s, decodeBrakeID, s.closeBrake(school.BrakeConfirmed))},
		{http.MethodPost, "/v1/brakes/{id}/clear", Admin, false, endpoint(s, decodeBrakeID, s.closeBrake(school.BrakeCleared))},
		{http.MethodGet, "/v1/cluster", Read, false, endpoint(s, decodeNothing, s.getCluster)},

		{http.MethodGet, "/healthz", open, true, endpoint(s, decodeNothing, s.getHealth)},
		{http.MethodGet, "/readyz", open, true, endpoint(s, decodeNothing, s.getReady)},
		{http.MethodGet, "/version", operations, true, endpoint(s, decodeNothing, s.getVersion)},
		{http.MethodGet, "/metrics", operations, true, metrics},
		{http.MethodGet, "/openapi.yaml", operations, true, http.HandlerFunc(serveOpenAPI)},
	}
}

func (s *Server) router() *chi.Mux {
	mux := chi.NewMux()
	for _, rt := range s.routes() {
		h := s.guarded(rt)
		mux.Method(rt.method, rt.pattern, h)
		if rt.method == http.MethodGet {
			mux.Method(http.MethodHead, rt.pattern, h) // net/http leaves the body out
		}
	}
	mux.NotFound(func(w http.ResponseWriter, r *http.Request) {
		s.writeError(w, r, &api.Error{Code: api.NotFound, Message: "there is no such path; /openapi.yaml lists them"})
	})
	mux.MethodNotAllowed(func(w http.ResponseWriter, r *http.Request) {
		allowed := s.allowed(r)
		w.Header().Set("Allow", strings.Join(allowed, ", "))
		s.writeError(w, r, &api.Error{Code: api.MethodNotAllowed, Message: "this path takes " + strings.Join(allowed, ", ")})
	})
	return mux
}

// guarded notes the route and asks for its key, before anything of the body is
// read.
func (s *Server) guarded(rt route) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		info := infoOf(r.Context())
		info.route, info.quiet = rt.pattern, rt.quiet
		if err := s.authenticate(r, rt.role); err != nil {
			s.writeError(w, r, err)
			return
		}
		rt.handler.ServeHTTP(w, r)
	})
}

// allowed lists the methods that the request's path takes.
func (s *Server) allowed(r *http.Request) []string {
	path := r.URL.RawPath // as the router matches
	if path == "" {
		path = r.URL.Path
	}
	var methods []string
	for _, m := range []string{http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodDelete} {
		if s.mux.Match(chi.NewRouteContext(), m, path) {
			methods = append(methods, m)
		}
	}
	slices.Sort(methods)
	return methods
}

// answer is what a call gives back.
type answer struct {
	status int // 0: 200
	header http.Header
	body   any
}

// endpoint makes a handler of a call: decode and check the request, call, write
// the answer; every error goes through the one table. Input that holds
// something (a temporary file, room for a body) is a closer, closed whatever
// happens.
func endpoint[In any](s *Server, decode func(http.ResponseWriter, *http.Request) (In, error), call func(context.Context, In) (answer, error)) http.Handler {
	serve := func(w http.ResponseWriter, r *http.Request) (answer, error) {
		in, err := decode(w, r)
		if err != nil {
			return answer{}, err
		}
		// Before the answer is written: whoever has it may ask again at once.
		if c, ok := any(in).(interface{ Close() }); ok {
			defer c.Close()
		}
		return call(r.Context(), in)
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		a, err := serve(w, r)
		if err != nil {
			s.writeError(w, r, err)
			return
		}
		for k, v := range a.header {
			w.Header()[k] = v
		}
		if a.status == 0 {
			a.status = http.StatusOK
		}
		writeJSON(w, a.status, a.body)
	})
}

// nothing is the input of a call that takes none.
type nothing struct{}

func decodeNothing(http.ResponseWriter, *http.Request) (nothing, error) { return nothing{}, nil }

// pathParam returns a part of the path as it was meant: the router hands out
// escaped parts where the path was escaped in an unusual way.
func pathParam(r *http.Request, name string) string {
	raw := chi.URLParam(r, name)
	if r.URL.RawPath == "" {
		return raw
	}
	s, err := url.PathUnescape(raw)
	if err != nil {
		return raw
	}
	return s
}
