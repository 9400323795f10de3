package outbox_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log"
	"sync"

	"github.com/jackc/pgx/v5"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"schoolbell/deploy/local/localtest"
	"schoolbell/school"
	"schoolbell/school/outbox"
	"schoolbell/school/store"
)

// A post on the school's board and the push about it, both or neither.
func ExampleEnqueue() {
	ctx := context.Background()
	db, err := sql.Open("pgx", exampleURL())
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()

	publish := func(title string) (err error) {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback() // does nothing once it is committed
		if _, err := tx.ExecContext(ctx, `INSERT INTO posts (title) VALUES ($1)`, title); err != nil {
			return err
		}
		if _, err := outbox.Enqueue(ctx, tx, outbox.Notice{
			School: "A", Title: title, Body: "See the board.",
			Recipients: []outbox.Recipient{{Token: "device-1", Ref: "student-1"}, {Token: "device-2"}},
		}); err != nil {
			return err
		}
		return tx.Commit()
	}
	for _, title := range []string{"Sports day is on Friday", ""} {
		err := publish(title)
		if field, ok := errors.AsType[*school.FieldError](err); ok {
			fmt.Printf("nothing was published: %s %s\n", field.Field, field.Message)
		} else if err != nil {
			log.Fatal(err)
		}
	}

	var posts, notices int
	if err := db.QueryRowContext(ctx, `SELECT (SELECT count(*) FROM posts WHERE title LIKE 'Sports%' OR title = ''),
		(SELECT count(*) FROM push_clusters WHERE title LIKE 'Sports%')`).Scan(&posts, &notices); err != nil {
		log.Fatal(err)
	}
	fmt.Println(posts, "post,", notices, "notice")
	// Output:
	// nothing was published: title is required
	// 1 post, 1 notice
}

// With gorm, give the transaction's ConnPool.
func ExampleEnqueue_gorm() {
	type Post struct {
		ID    int64
		Title string
	}
	ctx := context.Background()
	db, err := gorm.Open(postgres.Open(exampleURL()), &gorm.Config{Logger: logger.Discard})
	if err != nil {
		log.Fatal(err)
	}
	defer func() {
		if db, err := db.DB(); err == nil {
			db.Close()
		}
	}()

	post := Post{Title: "Bring an umbrella"}
	err = db.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
		if err := tx.Create(&post).Error; err != nil {
			return err
		}
		_, err := outbox.Enqueue(ctx, tx.Statement.ConnPool, outbox.Notice{
			School: "A", Title: post.Title, Topic: "class-3b", // the devices that have it now
			Data: map[string]string{"post": fmt.Sprint(post.ID)},
		})
		return err
	})
	if err != nil {
		log.Fatal(err)
	}

	var same bool
	err = db.Raw(`SELECT data->>'post' = ? FROM push_clusters WHERE title = ?`, fmt.Sprint(post.ID), post.Title).Scan(&same).Error
	fmt.Println("the notice names its post:", same, err)
	// Output: the notice names its post: true <nil>
}

// With pgx. The key makes it harmless to run the whole transaction again where
// nobody knows whether its commit came through: the same notice is answered.
func ExampleEnqueuePgx() {
	ctx := context.Background()
	conn, err := pgx.Connect(ctx, exampleURL())
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close(ctx)

	publish := func(title string) (id string, err error) {
		err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, `INSERT INTO posts (slug, title) VALUES ('lunch', $1) ON CONFLICT DO NOTHING`, title); err != nil {
				return err
			}
			id, err = outbox.EnqueuePgx(ctx, tx, outbox.Notice{
				School: "A", Title: title, IdempotencyKey: "post-lunch",
				Recipients: []outbox.Recipient{{Token: "device-1"}},
			})
			return err
		})
		return id, err
	}
	first, err := publish("Lunch is at noon")
	if err != nil {
		log.Fatal(err)
	}
	again, err := publish("Lunch is at noon")
	fmt.Println("again:", again == first, err)
	_, err = publish("Lunch is at one")
	fmt.Println("another notice with the key is refused:", errors.Is(err, outbox.ErrIdempotencyMismatch))
	// Output:
	// again: true <nil>
	// another notice with the key is refused: true
}

// From any language, this is what there is to do: call the function. What is wrong
// is SQLSTATE 22023 with the field and a hint.
func Example_sql() {
	ctx := context.Background()
	conn, err := pgx.Connect(ctx, exampleURL())
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close(ctx)

	_, err = conn.Exec(ctx, `
BEGIN;
INSERT INTO posts (title) VALUES ('Snow');
SELECT schoolbell_enqueue('A', 'Snow', 'No school tomorrow', NULL, ARRAY['device-1', 'device-2'],
	'{"priority": "urgent", "idempotency_key": "post-snow"}');
COMMIT;`)
	if err != nil {
		log.Fatal(err)
	}

	var posts, recipients int
	err = conn.QueryRow(ctx, `SELECT (SELECT count(*) FROM posts WHERE title = 'Snow'), total_count FROM push_clusters WHERE title = 'Snow'`).Scan(&posts, &recipients)
	fmt.Println(posts, "post,", recipients, "recipients", err)
	// Output: 1 post, 2 recipients <nil>
}

// exampleURL is a database with schoolbell's schema and an application's table,
// which the examples share.
var exampleURL = sync.OnceValue(func() string {
	ctx := context.Background()
	url, err := localtest.ExampleDatabase(ctx, "board")
	if err == nil {
		_, err = store.Migrate(ctx, url)
	}
	if err != nil {
		log.Fatal(err)
	}
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close(ctx)
	if _, err := conn.Exec(ctx, `CREATE TABLE posts (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, slug text UNIQUE, title text NOT NULL)`); err != nil {
		log.Fatal(err)
	}
	return url
})
