package simulator

import (
	"encoding/json"
	"net/http"
)

func (e *Engine) getBehaviour(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, e.Behaviour())
}

// putBehaviour replaces the whole behaviour; what is not given is its default.
func (e *Engine) putBehaviour(w http.ResponseWriter, r *http.Request) {
	b, err := decodeBehaviour(json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<20)))
	if err == nil {
		err = e.SetBehaviour(b)
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	writeJSON(w, e.Behaviour())
}

func (e *Engine) getCounts(w http.ResponseWriter, _ *http.Request) { writeJSON(w, e.Counts()) }

// getLog gives all arrivals so far, one line each, with the answer where there
// is one already.
func (e *Engine) getLog(w http.ResponseWriter, r *http.Request) {
	if !e.cfg.Keep {
		http.Error(w, "arrivals are not kept in memory: start with --keep, or read the log file", http.StatusNotFound)
		return
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	school := r.URL.Query().Get("school")
	lines := json.NewEncoder(w)
	for _, a := range e.Arrivals() {
		if school != "" && a.School != school {
			continue
		}
		if lines.Encode(a) != nil {
			return // the reader has gone
		}
	}
}

func writeJSON(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v) // the reader may have gone
}
