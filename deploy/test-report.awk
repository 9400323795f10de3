# Reads `go test -json` and writes what a person needs of it: a line a package,
# everything a failed package said, and how long slow tests took.
# Usage: go test -json ./... | awk -v slow=5 -f test-report.awk

# field returns the value of a string or number of a JSON line, still escaped.
function field(line, name,    at, rest, i, c) {
  at = index(line, "\"" name "\":")
  if (at == 0) return ""
  rest = substr(line, at + length(name) + 3)
  if (substr(rest, 1, 1) != "\"") {
    match(rest, /^[0-9.e+-]+/)
    return substr(rest, 1, RLENGTH)
  }
  for (i = 2; i <= length(rest); i++) {
    c = substr(rest, i, 1)
    if (c == "\\") i++
    else if (c == "\"") return substr(rest, 2, i - 2)
  }
  return ""
}

function plain(text) {
  gsub(/\\\\/, "\001", text)
  gsub(/\\n/, "\n", text)
  gsub(/\\t/, "\t", text)
  gsub(/\\r/, "\r", text)
  gsub(/\\"/, "\"", text)
  gsub(/\\u003c/, "<", text)
  gsub(/\\u003e/, ">", text)
  gsub(/\\u0026/, "\\&", text)
  gsub(/\\u001b/, "\033", text)
  gsub(/\001/, "\\", text)
  return text
}

# What is no JSON comes from the go command itself.
!/^{/ { print; next }

{
  action = field($0, "Action")
  package = field($0, "Package")
  test = field($0, "Test")
}

action == "build-output" { printf "%s", plain(field($0, "Output")); next }

action == "output" {
  text = plain(field($0, "Output"))
  if (text !~ /^=== (RUN|PAUSE|CONT|NAME)/) said[package] = said[package] text
  if (test == "" && text ~ /^(ok|\?) /) line[package] = text
  next
}

action == "pass" && test != "" && field($0, "Elapsed") + 0 >= slow {
  printf "slow  %s %s %ss\n", package, test, field($0, "Elapsed")
  next
}

test == "" && action == "fail" { printf "%s", said[package]; delete said[package]; failed++ }
test == "" && (action == "pass" || action == "skip") { printf "%s", line[package]; delete said[package] }

END {
  # A run that was cut off never says how its packages ended.
  for (package in said) if (said[package] != "") printf "%s", said[package]
  if (failed) printf "%d packages failed\n", failed
}
