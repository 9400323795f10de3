package plan

var pinned = []string{
	"1.667s redis-flush/quota rank 0 school 0 for 0s",
	"4.24s db-restart/terminate rank 0 school 0 for 5ms",
	"6.171s kill/dies rank 0 school 0 for 2.768s",
	"7.647s db-restart/immediate rank 0 school 0 for 421ms",
	"9.326s kill/dies rank 1 school 0 for 2.871s",
	"12.52s redis-flush/all rank 0 school 0 for 0s",
	"15.058s kill/dies rank 0 school 0 for 1.757s",
}
