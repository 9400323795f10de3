package outbox_test

import (
	"context"
	"database/sql"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	_ "github.com/jackc/pgx/v5/stdlib" // the driver pgx of database/sql
	"github.com/stretchr/testify/require"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"

	"schoolbell/deploy/local/localtest"
	"schoolbell/school"
	"schoolbell/school/outbox"
	"schoolbell/school/store"
)

func TestMain(m *testing.M) { localtest.Main(m) }

func notice(title string) outbox.Notice {
	off, badge := false, 3
	return outbox.Notice{School: "A", Title: title, Data: map[string]string{"k": "v"}, Recipients: []outbox.Recipient{
		{Token: `to"k\en,{}`, Ref: "학생-1", Badge: &badge, Data: map[string]string{"own": "1"}}, {Token: "two", Enabled: &off}, {Token: "two"}}}
}

// TestEnqueueInEachKindOfTransaction commits one and rolls one back with
// database/sql, gorm and pgx.
func TestEnqueueInEachKindOfTransaction(t *testing.T) {
	t.Parallel()
	url := localtest.PreparedDatabase(t, "outbox", func(ctx context.Context, url string) error {
		_, err := store.Migrate(ctx, url)
		return err
	})
	ctx := t.Context()
	db, err := sql.Open("pgx", url)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	orm, err := gorm.Open(postgres.New(postgres.Config{Conn: db}), &gorm.Config{})
	require.NoError(t, err)
	conn, err := pgx.Connect(ctx, url)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close(context.Background())) })
	rollback := errors.New("roll back")
	for name, within := range map[string]func(end error, use func(enqueue func(outbox.Notice) (string, error))) error{
		"database/sql": func(end error, use func(func(outbox.Notice) (string, error))) error {
			tx, err := db.BeginTx(ctx, nil)
			require.NoError(t, err)
			use(func(n outbox.Notice) (string, error) { return outbox.Enqueue(ctx, tx, n) })
			if end != nil {
				return errors.Join(end, tx.Rollback())
			}
			return tx.Commit()
		},
		"gorm": func(end error, use func(func(outbox.Notice) (string, error))) error {
			return orm.Transaction(func(tx *gorm.DB) error {
				use(func(n outbox.Notice) (string, error) { return outbox.Enqueue(ctx, tx.Statement.ConnPool, n) })
				return end
			})
		},
		"pgx": func(end error, use func(func(outbox.Notice) (string, error))) error {
			return pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
				use(func(n outbox.Notice) (string, error) { return outbox.EnqueuePgx(ctx, tx, n) })
				return end
			})
		},
	} {
		for _, end := range []error{nil, rollback} {
			var id string
			err := within(end, func(enqueue func(outbox.Notice) (string, error)) {
				// What is wrong by itself costs the transaction nothing.
				_, err := enqueue(outbox.Notice{School: "A", Title: " "})
				field, ok := errors.AsType[*school.FieldError](err)
				require.True(t, ok, "%v", err)
				require.Equal(t, "title", field.Field)
				id, err = enqueue(notice(name))
				require.NoError(t, err)
			})
			require.ErrorIs(t, err, end)
			var notices, recipients int
			require.NoError(t, db.QueryRow(`SELECT count(*) FROM push_clusters WHERE id = $1::bigint AND title = $2`, id, name).Scan(&notices))
			require.NoError(t, db.QueryRow(`SELECT count(*) FROM push_cluster_tokens WHERE cluster_id = $1::bigint AND (seq, job_status, token, coalesce(ref, '')) IN
				((1, 'PENDING', 'to"k\en,{}', '학생-1'), (2, 'PENDING', 'two', ''), (3, 'SKIPPED', 'two', ''))`, id).Scan(&recipients))
			if end == nil {
				require.Equal(t, []int{1, 3}, []int{notices, recipients}, name)
			} else {
				require.Equal(t, []int{0, 0}, []int{notices, recipients}, name)
			}
		}
	}

	// What the database finds.
	late := notice("late")
	late.ExpiresAt = time.Now().Add(-time.Hour)
	_, err = outbox.Enqueue(ctx, db, late)
	field, ok := errors.AsType[*school.FieldError](err)
	require.True(t, ok, "%v", err)
	require.Equal(t, school.FieldError{Field: "expires_at", Message: "has passed already"}, *field)
	once := notice("once")
	once.IdempotencyKey = "key"
	first, err := outbox.EnqueuePgx(ctx, conn, once)
	require.NoError(t, err)
	again, err := outbox.Enqueue(ctx, db, once)
	require.NoError(t, err)
	require.Equal(t, first, again)
	once.Title = "other"
	_, err = outbox.Enqueue(ctx, db, once)
	require.ErrorIs(t, err, outbox.ErrIdempotencyMismatch)
}

func TestEnqueueWithoutTheSchemaSaysWhatToDo(t *testing.T) {
	t.Parallel()
	conn, err := pgx.Connect(t.Context(), localtest.Database(t))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close(context.Background())) })
	_, err = outbox.EnqueuePgx(t.Context(), conn, notice("T"))
	require.ErrorIs(t, err, outbox.ErrSchema)
	require.ErrorContains(t, err, "schoolbell migrate up")
}
