package node

import (
	"errors"
	"fmt"
	"log/slog"
)

// cleanup closes what was opened, last first, each under its name.
type cleanup struct{ steps []step }

type step struct {
	name string
	fn   func() error
}

func (c *cleanup) add(name string, fn func() error) { c.steps = append(c.steps, step{name, fn}) }

// run closes everything once and goes on after an error.
func (c *cleanup) run(log *slog.Logger) error {
	var errs []error
	for len(c.steps) > 0 {
		s := c.steps[len(c.steps)-1]
		c.steps = c.steps[:len(c.steps)-1]
		if err := s.fn(); err != nil {
			errs = append(errs, fmt.Errorf("close %s: %w", s.name, err))
		}
	}
	log.Debug("closed", "event", "closed", "errors", len(errs))
	return errors.Join(errs...)
}
