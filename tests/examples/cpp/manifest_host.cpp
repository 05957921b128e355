// Opens the bundle that the first argument names; prints what its manifest says, or the error.

#include <iostream>

#include "dsbd/manifest.hpp"

int main(int num_arguments, char** arguments) {
    if (num_arguments != 2) {
        return 1;
    }
    try {
        const dsbd::Bundle bundle = dsbd::open_bundle(arguments[1]);
        std::cout << bundle.target.vocab_size << " " << bundle.target.num_candidates << " "
                  << (bundle.draft ? "draft" : "no draft") << std::endl;
        return 0;
    } catch (const dsbd::Error& error) {
        std::cerr << error.what() << std::endl;
        return 2;
    }
}
