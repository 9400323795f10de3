package storm

import "context"

// Scenario is one exact story, played instead of planned faults.
type Scenario struct {
	Name string
	What string // for people
	Run  func(ctx context.Context, cfg Config) (Result, error)
}

// Scenarios lists them.
func Scenarios() []Scenario { return nil }
