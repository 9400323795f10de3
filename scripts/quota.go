package scripts

// Reserve grants attempts to a school's owner: reserve.lua.
func Reserve() Script { return load("reserve") }

// Settle says what became of a reservation: settle.lua.
func Settle() Script { return load("settle") }

// Reconcile raises a quota to what the ledger says: reconcile.lua.
func Reconcile() Script { return load("reconcile") }

// Rebuild sets a rest anew after the clock went back: rebuild.lua.
func Rebuild() Script { return load("rebuild") }

// Peek looks at a school's lock and quota: peek.lua.
func Peek() Script { return load("peek") }
