// cli.h: the `tandem` command line: which command, its arguments, its help.
//
// Thread: the main thread, before anything else runs.
#ifndef TANDEM_ROUTER_CLI_H
#define TANDEM_ROUTER_CLI_H

#include "engine/config.h"

// Runs a command. The result is the process's exit status: 0, 1 when a command failed, 2 when the
// command line or the configuration is wrong (said in one line on standard error).
enum { CLI_FAILED = 1, CLI_WRONG_USAGE = 2 };
int cli_run(int argc, char **argv);

#endif
