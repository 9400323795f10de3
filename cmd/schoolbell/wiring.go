package main

import (
	"context"
	"errors"
	"log/slog"

	"schoolbell/coordinator/node/settings"
)

var errNoReplica = errors.New("this build has no replica")

// replica joins the commands to package node.
func replica() replicaCommands {
	none := func(context.Context, settings.Settings) ([]migration, error) { return nil, errNoReplica }
	return replicaCommands{
		serve:         func(context.Context, settings.Settings, *slog.Logger, build) error { return errNoReplica },
		migrateUp:     none,
		migrateStatus: none,
		migrateDown: func(context.Context, settings.Settings, int64) ([]migration, error) {
			return nil, errNoReplica
		},
	}
}
