// A predicted text, followed by the paths of a request.
#include "drafting/prediction.hpp"

#include <cmath>
#include <cstdlib>

namespace dsbd {
namespace {

constexpr std::int64_t REACH = 8;
constexpr std::int64_t NEAREST = 16;  // places that are compared on each side: bounds the time
constexpr double FIRST_RATE = 0.9, LEAST_RATE = 0.05, STEP = 0.05;
constexpr double SURE = 0.75;  // probability that the next tokens of all beams are right
// Of the places to go on, likeliest first, after one unexpected token.
constexpr double SHARES[] = {0.4, 0.25, 0.15};

/// A path that has repeated the prediction up to a place.
Place following(std::int64_t place) { return {place, 0, {place}, 1}; }

std::int64_t index_of(const Ints& places, std::int64_t least) {
    return std::lower_bound(places.begin(), places.end(), least) - places.begin();
}

}  // namespace

Prediction::Prediction(Ints token_ids) : token_ids_(std::move(token_ids)), rate_(FIRST_RATE) {
    for (std::size_t place = 0; place < token_ids_.size(); ++place) {
        places_[token_ids_[place]].push_back(static_cast<std::int64_t>(place));
    }
}

Place Prediction::after(const Place& place, IntSpan path) const {
    if (is_empty()) return place;
    const auto size = static_cast<std::int64_t>(token_ids_.size());
    for (const std::int64_t next : place.next()) {
        if (next < size && token_ids_[at(next)] == path.back()) {
            return following(next + 1);
        }
    }
    Place lost{place.lost_at, place.num_lost + 1, {}, 0};
    // Of the last token, if each has replaced another.
    const std::int64_t expected = lost.lost_at + lost.num_lost - 1;
    // First only from there on: in a text that repeats itself all before an edit agrees best.
    Found found = nearest(expected, path, lost.lost_at);
    if (found.num_agreeing < 2 && lost.num_lost >= 2) found = nearest(expected, path, 0);
    if (found.num_agreeing > 1) return following(found.place + 1);
    const auto add = [&lost](std::int64_t next) {
        const auto known = lost.next();
        if (!is_among(known, next)) {
            lost.next_places[lost.num_next++] = next;
        }
    };
    if (found.num_agreeing) add(found.place + 1);  // as after a deletion
    add(expected + 1);
    add(lost.lost_at);
    return lost;
}

std::vector<Share> Prediction::shares(const Place& place) const {
    std::vector<Share> found;
    for (std::size_t i = 0; i < place.num_next; ++i) {
        const auto next = at(place.next_places[i]);
        if (next >= token_ids_.size()) continue;
        const double probability =
            place.num_lost ? SHARES[i] / static_cast<double>(place.num_lost) : rate_;
        const auto known = std::find_if(found.begin(), found.end(), [&](const Share& share) {
            return share.first == token_ids_[next];
        });
        if (known == found.end()) {
            found.emplace_back(token_ids_[next], probability);
        } else {
            known->second += probability;
        }
    }
    return found;
}

void Prediction::learn(const Place& place) {
    if (place.num_lost >= 2) return;
    rate_ = std::max(rate_ + STEP * ((place.num_lost ? 0.0 : 1.0) - rate_), LEAST_RATE);
}

bool Prediction::replaces_model(const Place& place, std::size_t num_beams) const {
    return !place.num_lost && std::pow(rate_, static_cast<double>(num_beams)) > SURE;
}

Prediction::Found Prediction::nearest(std::int64_t expected, IntSpan path,
                                      std::int64_t first) const {
    Found best{0, 0, 0};
    const auto known = places_.find(path.back());
    if (known == places_.end()) return best;
    const Ints& places = known->second;
    const std::int64_t middle = index_of(places, expected);
    const std::int64_t begin = std::max(index_of(places, first), middle - NEAREST);
    const std::int64_t end = std::min(middle + NEAREST, static_cast<std::int64_t>(places.size()));
    for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t place = places[at(i)];
        const std::int64_t agreeing = num_agreeing(place, path);
        const std::int64_t distance = std::abs(place - expected);
        if (distance <= std::int64_t{1} << (3 * agreeing)) {  // REACH to the power of it
            best = std::max(best, {agreeing, -distance, place});
        }
    }
    return best;
}

std::int64_t Prediction::num_agreeing(std::int64_t place, IntSpan path) const {
    const auto most = std::min({REACH, static_cast<std::int64_t>(path.size()), place + 1});
    std::int64_t number = 0;
    while (number < most && token_ids_[static_cast<std::size_t>(place - number)] ==
                                path[path.size() - 1 - at(number)]) {
        ++number;
    }
    return number;
}

}  // namespace dsbd
