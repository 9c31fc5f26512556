// tandem-attn: an attention worker, or a whole colocated worker.
#include "engine/worker.h"

int main(int argc, char **argv) {
    return worker_main(argc, argv, &attn_node_type, &ffn_node_type);
}
