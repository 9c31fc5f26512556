// tandem-ffn: an FFN worker.
#include "engine/worker.h"

int main(int argc, char **argv) {
    return worker_main(argc, argv, &ffn_node_type, NULL);
}
