package scripts

// Take takes a batch of a sender's rate, or a place in the line: take.lua.
func Take() Script { return load("take") }

// Report says what a batch found out about a sender's receiver: report.lua.
func Report() Script { return load("report") }

// Look looks at a sender's rate, line and state: look.lua.
func Look() Script { return load("look") }
