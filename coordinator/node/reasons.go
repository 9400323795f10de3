package node

import (
	"errors"
	"fmt"
	"io/fs"
	"syscall"

	"schoolbell/coordinator/node/settings"
	"schoolbell/school"
	"schoolbell/school/store"
)

// Reasons for which a replica does not start and a schema is not migrated, beside
// school.ErrUnavailable, for callers that know this package alone.
var (
	ErrLogin      = store.ErrLogin      // the database refuses the user
	ErrNoDatabase = store.ErrNoDatabase // the server has no database of that name
)

// VersionError is a version that the schema cannot be taken back to.
type VersionError = store.VersionError

// setting is a setting with the place where it was given, for errors: of the
// many ways to give one, that is the one to mend.
func setting(s settings.Settings, path string) string {
	if o := s.Origin(path); o.Layer != settings.LayerDefault {
		return path + " (" + o.String() + ")"
	}
	return path
}

// databaseError names the setting behind a database that cannot be opened.
func databaseError(s settings.Settings, err error) error {
	if errors.Is(err, ErrLogin) || errors.Is(err, ErrNoDatabase) || errors.Is(err, school.ErrUnavailable) {
		return fmt.Errorf("%s: %w", setting(s, "database_url"), err)
	}
	return err
}

// listenError says what to do about an address that cannot be listened on.
func listenError(s settings.Settings, err error) error {
	if errors.Is(err, syscall.EADDRINUSE) {
		return &told{fmt.Sprintf("%s: another program listens on %s; give another address (--http-listen, SCHOOLBELL_HTTP_LISTEN) or stop that program",
			setting(s, "http.listen"), s.HTTP.Listen), err}
	}
	return fmt.Errorf("%s %s: %w", setting(s, "http.listen"), s.HTTP.Listen, err)
}

// senderError names the setting behind a sender that cannot be made.
func senderError(s settings.Settings, name string, err error) error {
	if file := s.Senders[name].CredentialsFile; file != "" && errors.Is(err, fs.ErrNotExist) {
		return &told{fmt.Sprintf("%s: there is no file %s; give the path of a service account's key (JSON), which the Firebase console makes",
			setting(s, "senders."+name+".credentials_file"), file), err}
	}
	return err
}

// onlyError names the setting behind a list of devices that cannot be used.
func onlyError(s settings.Settings, name string, err error) error {
	path := setting(s, "senders."+name+".only_tokens_file")
	if errors.Is(err, fs.ErrNotExist) {
		return &told{fmt.Sprintf("%s: there is no file %s; write one, a token a line (an empty one sends to nobody)",
			path, s.Senders[name].OnlyTokensFile), err}
	}
	return fmt.Errorf("%s: %w", path, err)
}

// told is an error in words that take the place of its cause's.
type told struct {
	text  string
	cause error
}

func (e *told) Error() string { return e.text }
func (e *told) Unwrap() error { return e.cause }
