// bundle_test: open the bundle of each line of stdin; print "ok", or the error in one line.
#include <iostream>
#include <string>

#include "runtime/manifest.hpp"

int main() {
    for (std::string folder; std::getline(std::cin, folder);) {
        std::string answer = "ok";
        try {
            dsbd::open_bundle(folder);
        } catch (const dsbd::Error& error) {
            answer = error.what();
        }
        for (char& c : answer) c = c == '\n' ? ' ' : c;
        std::cout << answer << std::endl;
    }
}
