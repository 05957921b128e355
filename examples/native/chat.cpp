// chat BUNDLE [OPTIONS]: answer each line of standard input as the next message of a conversation, streamed.
//
//     export PKG_CONFIG_PATH=DIR/lib/pkgconfig   # DIR: where dsbd_native is installed
//     libraries=$(pkg-config --variable=libdir dsbd_native)
//     c++ -std=c++17 chat.cpp $(pkg-config --cflags --libs dsbd_native) -Wl,-rpath,"$libraries" -o chat
//     ./chat bundle/ '{"num_beams": 2}'
#include <dsbd_native.h>

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>

/// A message of the conversation in JSON; a library for JSON does the same.
static std::string message(const char* role, const std::string& content) {
    std::string quoted;
    for (const char c : content) {
        char escaped[8];
        std::snprintf(escaped, sizeof escaped, "\\u%04x", static_cast<unsigned char>(c));
        const bool is_special = c == '"' || c == '\\' || static_cast<unsigned char>(c) < 0x20;
        quoted += is_special ? std::string(escaped) : std::string(1, c);
    }
    return "{\"role\": \"" + std::string(role) + "\", \"content\": \"" + quoted + "\"}";
}

/// Print text as it becomes final, and keep it for the next turn.
static int print_step(const dsbd_step* step, void* answer) {
    const std::string text(step->text, step->num_text_bytes);
    static_cast<std::string*>(answer)->append(text);
    std::cout << text << std::flush;
    return 0;
}

int main(int num_arguments, char** arguments) {
    dsbd_pipeline* pipeline = nullptr;
    if (num_arguments != 2 && num_arguments != 3) {
        std::cerr << "usage: chat BUNDLE [OPTIONS]" << std::endl;
        return EXIT_FAILURE;
    }
    // chat_defaults: an answer as long as the model makes it, temperature 0.7 unless it has its own
    dsbd_status status = dsbd_open(arguments[1], "{\"chat_defaults\": true}", &pipeline);
    std::string conversation;
    for (std::string line; status == DSBD_OK && std::getline(std::cin, line);) {
        conversation += (conversation.empty() ? "" : ", ") + message("user", line);
        const std::string messages = "[" + conversation + "]";
        std::string answer;
        dsbd_request request{};
        request.messages = messages.c_str();
        request.options = arguments[2];  // nullptr: the defaults
        request.on_step = print_step;
        request.on_step_context = &answer;
        status = dsbd_generate(pipeline, &request, nullptr);
        std::cout << std::endl;
        conversation += ", " + message("assistant", answer);
    }
    if (status != DSBD_OK) std::cerr << dsbd_last_error() << std::endl;
    dsbd_close(pipeline);
    return status;
}
