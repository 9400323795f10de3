package node

import (
	"context"

	"schoolbell/coordinator"
	"schoolbell/coordinator/web"
)

// outbox is all that a replica asks of its database, whichever engine it is.
type outbox interface {
	coordinator.Queue
	web.Notices
	web.Schools
	stock
	// Listen hears of schools that were given work inside an application's own
	// transaction until ctx ends.
	Listen(ctx context.Context, onReady func(), onSchool func(schoolID string)) error
	Close()
}
