// Replays trainings that tests/execution/test_compilers.py wrote to a file, and compares the results: replay FILE TOLERANCE.
// It shows that the kernels of another compiler or processor compute the same.

#include "compiled.cpp"

#include <cstdio>
#include <cstdlib>
#include <fstream>

static std::ifstream file;

template <typename number>
static number read_number() {
    number value;
    file.read(reinterpret_cast<char *>(&value), sizeof value);
    return value;
}

template <typename number>
static std::vector<number> read_numbers() {
    std::vector<number> values(read_number<int64_t>());
    file.read(reinterpret_cast<char *>(values.data()), values.size() * sizeof(number));
    return values;
}

static int64_t programs = 0;

template <typename real>
static double replay() {
    const auto inputs = read_numbers<real>();
    const int64_t features = read_number<int64_t>();
    const auto rows = read_numbers<int64_t>(), targets = read_numbers<int64_t>(), sizes = read_numbers<int64_t>();
    const auto divisors = read_numbers<double>();
    const auto values = read_numbers<int64_t>();
    std::vector<std::vector<int64_t>> fixed, numbers, tables;
    std::vector<std::vector<double>> reals;
    for (int64_t i = read_number<int64_t>(); i > 0; i--) {
        fixed.push_back(read_numbers<int64_t>()), numbers.push_back(read_numbers<int64_t>());
        reals.push_back(read_numbers<double>()), tables.push_back(read_numbers<int64_t>());
    }
    std::vector<NodeSpec> nodes;
    for (size_t i = 0; i < fixed.size(); i++) {
        const auto &f = fixed[i];
        nodes.push_back({f[0], {f[1], f[2], f[3]}, f[4], {f[5], f[6], f[7], f[8]}, numbers[i].data(), reals[i].data(),
                         tables[i].data(), int64_t(tables[i].size()), f[9], {f[10], f[11], f[12], f[13]}});
    }
    std::vector<std::vector<real>> weights, momenta, expected;
    std::vector<int64_t> trained;
    for (int64_t i = read_number<int64_t>(); i > 0; i--) {
        trained.push_back(read_number<int64_t>());
        weights.push_back(read_numbers<real>()), expected.push_back(read_numbers<real>());
        momenta.emplace_back(weights.back().size());
    }
    std::vector<ParameterPlaces> parameters;
    const auto place = [](std::vector<real> &numbers) { return int64_t(intptr_t(numbers.data())); };
    for (size_t i = 0; i < weights.size(); i++)
        parameters.push_back({place(weights[i]), trained[i] ? place(momenta[i]) : -1, -1, -1, trained[i]});
    const auto seeds = read_numbers<int64_t>();
    const int64_t output = read_number<int64_t>(), classes = read_number<int64_t>();
    const Table table{inputs.data(), features, 0, nullptr};
    const int64_t steps = sizes.size();
    const Batches batches{rows.data(), targets.data(), sizes.data(), divisors.data(), steps, int64_t(rows.size()) / steps, CLASSES};
    NetworkSpec network{reinterpret_cast<const ValueSpec *>(values.data()), nodes.data(), int64_t(values.size()) / 3,
                        int64_t(nodes.size()), int64_t(parameters.size()), output, classes, ++programs, parameters.data(), {},
                        seeds.data(), 0, nullptr, nullptr, 0, 0, 1, 0, 0, 0};
    OptimizerSpec optimizer{};
    optimizer.draws_per_step = 1 << 20, optimizer.lr = 0.05, optimizer.momentum = 0.9;
    optimizer.clip = std::numeric_limits<double>::infinity();
    TrainJob job{batches, {}, &network, 1, &optimizer, nullptr, 0, 0};
    if (run_piece({&table, sizeof(real), &job, 1, true, WAITING, 0})) std::abort();
    double worst = 0;
    for (size_t i = 0; i < weights.size(); i++) {
        double difference = 0, size = 0;
        for (size_t j = 0; j < weights[i].size(); j++) {
            difference += std::pow(double(weights[i][j]) - double(expected[i][j]), 2);
            size += std::pow(double(expected[i][j]), 2);
        }
        const double error = std::sqrt(difference / (size + 1e-300));
        worst = error <= worst ? worst : error;  // NaN counts as worse
    }
    return worst;
}

int main(int, char **arguments) {
    file.open(arguments[1], std::ios::binary);
    const double tolerance = std::atof(arguments[2]);
    bool good = fedme_runs_here();
    for (int64_t count = read_number<int64_t>(); count > 0; count--) {
        const double error = read_number<int64_t>() == 4 ? replay<float>() : replay<double>();
        std::printf("%.1e\n", error);
        good = good && error <= tolerance;
    }
    return good ? 0 : 1;
}
