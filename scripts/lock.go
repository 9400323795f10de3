package scripts

// Acquire takes a school's lock: acquire.lua.
func Acquire() Script { return load("acquire") }

// Bind writes the fencing number on a held lock: bind.lua.
func Bind() Script { return load("bind") }

// Extend lengthens the lease of a held lock: extend.lua.
func Extend() Script { return load("extend") }

// Release gives a held lock back: release.lua.
func Release() Script { return load("release") }
