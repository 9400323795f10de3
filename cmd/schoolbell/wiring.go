package main

import (
	"context"
	"log/slog"

	"schoolbell/coordinator/api"
	"schoolbell/coordinator/node"
	"schoolbell/coordinator/node/settings"
)

// replica joins the commands to package node, which alone knows the parts.
func replica() replicaCommands {
	return replicaCommands{
		serve: func(ctx context.Context, s settings.Settings, log *slog.Logger, b build) error {
			n, err := node.New(ctx, s, node.Deps{Log: log, Version: api.Version{Version: b.Version, Commit: b.Commit, Go: b.Go}})
			if err != nil {
				return err
			}
			return n.Run(ctx)
		},
		migrateUp: func(ctx context.Context, s settings.Settings) ([]migration, error) {
			return migrations(node.MigrateUp(ctx, s))
		},
		migrateStatus: func(ctx context.Context, s settings.Settings) ([]migration, error) {
			return migrations(node.MigrateStatus(ctx, s))
		},
		migrateDown: func(ctx context.Context, s settings.Settings, to int64) ([]migration, error) {
			return migrations(node.MigrateDown(ctx, s, to))
		},
	}
}

func migrations(steps []node.Step, err error) ([]migration, error) {
	all := make([]migration, len(steps))
	for i, s := range steps {
		all[i] = migration{Version: s.Version, Name: s.Name}
		if !s.AppliedAt.IsZero() {
			all[i].AppliedAt = &s.AppliedAt
		}
	}
	return all, err
}
