// A predicted text, followed by the paths of a request: the place where each goes on, after edits.
#pragma once

#include <array>
#include <unordered_map>

#include "forward.hpp"

namespace dsbd {

/// A token and its share of the probability; lists of them are in the order first proposed.
using Share = std::pair<std::int64_t, double>;

/// A path's place in the prediction.
struct Place {
    std::int64_t lost_at = 0;   // the first predicted token that the path has not repeated
    std::int64_t num_lost = 0;  // tokens of the path since then; 0 if it follows the prediction
    // Places of the predicted tokens that may come next, likeliest first.
    std::array<std::int64_t, 3> next_places{};
    std::size_t num_next = 1;

    IntSpan next() const { return {next_places.data(), num_next}; }
};

/// The tokens that an output is expected to repeat, and how often it did.
///
/// Worked example, of the prediction [1, 2, 3, 4, 5]: after the path [1, 2] token 3 is expected, at
/// place 2. After [1, 2, 9] these are, by place: 3, token 4, as if 9 had replaced 3; and 2, token
/// 3, as if 9 had been inserted. After [1, 2, 4]: 4, token 5, as if 3 had been deleted, then both.
class Prediction {
public:
    explicit Prediction(Ints token_ids);

    bool is_empty() const { return token_ids_.empty(); }
    /// Return the place of a path, of which the last tokens suffice; place: without the last one.
    Place after(const Place& place, IntSpan path) const;
    /// Return the probabilities of the tokens that may come next; less than 1 together.
    std::vector<Share> shares(const Place& place) const;
    /// Count the place of a selected path: whether it follows, if its parent did.
    void learn(const Place& place);
    /// Return whether the next token is sure enough to do without a draft model's call: of all
    /// `num_beams` beams, as a layer without one of their next tokens is not accepted.
    bool replaces_model(const Place& place, std::size_t num_beams) const;

private:
    struct Found {
        std::int64_t num_agreeing, minus_distance, place;
        auto operator<=>(const Found&) const = default;
    };
    Found nearest(std::int64_t expected, IntSpan path, std::int64_t first) const;
    std::int64_t num_agreeing(std::int64_t place, IntSpan path) const;

    Ints token_ids_;
    std::unordered_map<std::int64_t, Ints> places_;  // of each token, increasing
    double rate_;  // how often the next token was right
};

}  // namespace dsbd
