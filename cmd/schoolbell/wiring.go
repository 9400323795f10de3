package main

import (
	"context"
	"log/slog"

	"schoolbell/coordinator/api"
	"schoolbell/coordinator/node"
	"schoolbell/coordinator/node/demo"
	"schoolbell/coordinator/node/settings"
	"schoolbell/sender/simulator/verdict"
)

// replica joins the commands to package node, which alone knows the parts.
func replica() replicaCommands {
	return replicaCommands{
		serve: func(ctx context.Context, s settings.Settings, log *slog.Logger, b build) error {
			node.LogRedis(log)
			n, err := node.New(ctx, s, node.Deps{Log: log, Version: api.Version{Version: b.Version, Commit: b.Commit, Go: b.Go}})
			if err != nil {
				return err
			}
			return n.Run(ctx)
		},
		demo: func(ctx context.Context, cfg demo.Config) (verdict.Verdict, error) {
			if cfg.Log == nil {
				cfg.Log = slog.New(slog.DiscardHandler)
			}
			node.LogRedis(cfg.Log)
			return demo.Run(ctx, cfg)
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
