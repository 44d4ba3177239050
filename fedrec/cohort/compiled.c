// SPDX-License-Identifier: Apache-2.0
// The inner loops of the cohort engine, called by fedrec/cohort/compiled.py: both passes of a perceptron per client, with
// the SGD step of its own parameters; all steps of clients that do the same in each; and sums of what clients changed.
//
// One client after the other, so that what it needs stays in the caches. Activations lie [features][examples]: with
// weights that lie [in][out], no product then runs against the grain of its second factor. The products are made by the
// BLAS that is handed over, all in the column-major words of Fortran: a matrix [a][b] here is b x a there.

#include <math.h>
#include <stddef.h>
#include <string.h>

#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__)
#define WIDEST __attribute__((target_clones("avx512f", "avx2", "default")))  // chosen when the library is loaded
#else
#define WIDEST
#endif
#define LANES 16
#define LINE 16   // numbers that memory gives at once
#define SPAN 128  // numbers of a client that are added up, and as many of it fetched meanwhile

typedef void (*sgemm_t)(const char *, const char *, const int *, const int *, const int *, const float *, const float *,
                        const int *, const float *, const int *, const float *, float *, const int *);

// What stays the same from step to step. fedrec.cohort.compiled._Plan names the same fields in the same order.
typedef struct {
    sgemm_t sgemm;
    int clients, examples, parts, layers;
    int hidden_width;            // of all layers but the last, added up
    int largest_width;           // of inputs and layers
    const int *part_widths;      // [parts]
    const int *part_examples;    // [parts]: 1, or examples
    const int *widths;           // [layers], of outputs
    float *const *weights;       // [layers], [clients][in][out] each
    float *const *biases;        // [layers], [clients][out] each
    const ptrdiff_t *weight_strides;  // [layers]: floats from a client to the next
    const ptrdiff_t *bias_strides;    // [layers]
    const float *weight_rates;   // [layers]: step sizes
    const float *bias_rates;     // [layers]
} plan_t;

enum { HELD, GATHERED, MIXED };

// Where an input of a perceptron comes from in every step. fedrec.cohort.compiled._Source names the same fields.
typedef struct {
    int kind, width;
    int categories;        // MIXED: rows of the table
    float rate;            // GATHERED, MIXED: step size of the table
    float *values;         // HELD: [clients][width]; GATHERED: [places][width]; MIXED: tables [clients][categories][width]
    ptrdiff_t stride;      // HELD, MIXED: floats from a client to the next
    const float *shares;   // MIXED: [places][categories], how much each row of the table counts
    const float *rates;    // HELD: [clients][width], step sizes
} source_t;

// The examples of all steps. fedrec.cohort.compiled._Examples names the same fields.
typedef struct {
    int row;                  // numbers from a step to the next
    const int *ends;          // [clients]: the step after each one's last
    const ptrdiff_t *places;  // [steps][row]: clients one after the other, and `examples` of each
    const float *labels, *weights;  // likewise
    float *logits;            // likewise, written
    float *biases;            // [places], added to the logits; or NULL
    float bias_rate;
} examples_t;

// A parameter of all clients, and the sum of their updates. fedrec.cohort.compiled._Sum names the same fields.
typedef struct {
    double *totals;        // [count]
    const float *start;    // [count]
    const float *values;   // [clients][count]
    ptrdiff_t stride;      // of values: floats from a client to the next
    ptrdiff_t count;
} sum_t;

// sums [out] += row [in] times weights [in][out]
WIDEST static void add_product(float *sums, const float *row, const float *weights, int in, int out) {
    for (int i = 0; i < in; i++)
        for (int o = 0; o < out; o++) sums[o] += row[i] * weights[(ptrdiff_t)i * out + o];
}

// to_row [in] = weights [in][out] times gradient [out], and then weights -= rate row^T gradient: weights are read once
WIDEST static void descend_product(float *weights, const float *row, const float *gradient, float *to_row, int in, int out,
                                   float rate) {
    for (int i = 0; i < in; i++) {
        float *own = weights + (ptrdiff_t)i * out, lanes[LANES] = {0}, total = 0;
        const float factor = rate * row[i];
        int o = 0;
        for (; o + LANES <= out; o += LANES)
            for (int lane = 0; lane < LANES; lane++) {
                lanes[lane] += own[o + lane] * gradient[o + lane];
                own[o + lane] -= factor * gradient[o + lane];
            }
        for (; o < out; o++) {
            total += own[o] * gradient[o];
            own[o] -= factor * gradient[o];
        }
        for (int lane = 0; lane < LANES; lane++) total += lanes[lane];
        to_row[i] = total;
    }
}

// sums [rows] of values [rows][columns], and bias [rows] -= rate sums
WIDEST static void descend_bias(float *bias, const float *values, float *sums, int rows, int columns, float rate) {
    for (int r = 0; r < rows; r++) {
        const float *own = values + (ptrdiff_t)r * columns;
        float lanes[LANES] = {0}, total = 0;
        int c = 0;
        for (; c + LANES <= columns; c += LANES)
            for (int lane = 0; lane < LANES; lane++) lanes[lane] += own[c + lane];
        for (; c < columns; c++) total += own[c];
        for (int lane = 0; lane < LANES; lane++) total += lanes[lane];
        sums[r] = total;
        bias[r] -= rate * total;
    }
}

WIDEST static void fill_rows(float *to, const float *values, int rows, int columns) {
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) to[(ptrdiff_t)r * columns + c] = values[r];
}

WIDEST static void transpose(const float *from, float *to, int rows, int columns) {
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) to[(ptrdiff_t)c * rows + r] = from[(ptrdiff_t)r * columns + c];
}

WIDEST static void relu(float *values, ptrdiff_t count) {
    for (ptrdiff_t i = 0; i < count; i++) values[i] = values[i] <= 0 ? 0 : values[i];  // so that NaN stays NaN
}

WIDEST static void through_relu(float *gradient, const float *outputs, ptrdiff_t count) {
    for (ptrdiff_t i = 0; i < count; i++) gradient[i] = outputs[i] <= 0 ? 0 : gradient[i];
}

WIDEST static void gather(float *to, const float *from, const ptrdiff_t *places, int count, int width) {
    for (int n = 0; n < count; n++)
        for (int i = 0; i < width; i++) to[(ptrdiff_t)n * width + i] = from[places[n] * width + i];
}

WIDEST static void descend_gathered(float *values, const float *gradient, const ptrdiff_t *places, int count, int width,
                                    float rate) {
    for (int n = 0; n < count; n++)  // a row that was gathered twice gets both
        for (int i = 0; i < width; i++) values[places[n] * width + i] -= rate * gradient[(ptrdiff_t)n * width + i];
}

WIDEST static void descend_each(float *values, const float *gradient, const float *rates, int count) {
    for (int i = 0; i < count; i++) values[i] -= rates[i] * gradient[i];
}

// Asks for what will be needed soon. Clients were trained a while ago, so that their values are in no near cache any more.
static inline void fetch(const float *values, ptrdiff_t count) {
    for (ptrdiff_t i = 0; i < count; i += LINE) __builtin_prefetch(values + i);
}

// totals += over the clients, share times (values - start), of each parameter; a client of share 0 adds nothing, whatever
// it holds
WIDEST void fedrec_add_updates(const sum_t *sums, int parameters, const double *shares, int clients) {
    for (const sum_t *sum = sums; sum < sums + parameters; sum++)
        for (ptrdiff_t from = 0; from < sum->count; from += SPAN) {
            const ptrdiff_t end = sum->count - from < SPAN ? sum->count : from + SPAN;
            const ptrdiff_t ahead = sum->count - end < SPAN ? sum->count - end : SPAN;
            for (int client = 0; client < clients; client++) {
                const double share = shares[client];
                const float *own = sum->values + client * sum->stride, *start = sum->start;
                double *totals = sum->totals;
                fetch(own + end, ahead);
                if (share != 0)
                    for (ptrdiff_t i = from; i < end; i++) totals[i] += share * ((double)own[i] - start[i]);
            }
        }
}

// Over the clients and the rows of a table that each touched: totals [slot of the row's item][width] += share times (row
// - its row of start). An item that has none (-1 in slots [items]) gets the next slot, whose totals are 0, and is noted
// in rows. touched, values: [clients][widest][...], of which counts [clients] are real; a client of share 0 adds nothing.
// Gives the number of slots that are then used.
WIDEST ptrdiff_t fedrec_add_row_updates(double *totals, ptrdiff_t *slots, ptrdiff_t *rows, ptrdiff_t used,
                                        const float *start, const ptrdiff_t *touched, const ptrdiff_t *counts,
                                        const float *values, const double *shares, int clients, ptrdiff_t widest,
                                        int width) {
    for (int client = 0; client < clients; client++) {
        const double share = shares[client];
        for (ptrdiff_t n = 0; share != 0 && n < counts[client]; n++) {
            const ptrdiff_t item = touched[client * widest + n];
            const float *row = values + (client * widest + n) * width, *before = start + item * width;
            if (slots[item] < 0) {
                rows[used] = item;
                slots[item] = used++;
            }
            double *total = totals + slots[item] * width;
            for (int i = 0; i < width; i++) total[i] += share * ((double)row[i] - before[i]);
        }
    }
    return used;
}

// inputs: [parts], [1 or examples][width] each
// hidden: [hidden width][examples], kept for the backward pass
// outputs: [last width][examples]
// scratch: [largest width]
static void forward(const plan_t *plan, int client, const float *const *inputs, float *hidden, float *outputs,
                    float *scratch) {
    const int examples = plan->examples, first = plan->widths[0];
    const float one = 1, *weights = plan->weights[0] + client * plan->weight_strides[0], *rows = weights;
    float *current = plan->layers > 1 ? hidden : outputs;
    memcpy(scratch, plan->biases[0] + client * plan->bias_strides[0], sizeof(float) * first);
    for (int part = 0; part < plan->parts; rows += (ptrdiff_t)plan->part_widths[part++] * first)
        if (plan->part_examples[part] == 1) add_product(scratch, inputs[part], rows, plan->part_widths[part], first);
    fill_rows(current, scratch, first, examples);
    rows = weights;
    for (int part = 0; part < plan->parts; rows += (ptrdiff_t)plan->part_widths[part++] * first)
        if (plan->part_examples[part] != 1)
            plan->sgemm("T", "T", &examples, &first, &plan->part_widths[part], &one, inputs[part],
                        &plan->part_widths[part], rows, &first, &one, current, &examples);
    for (int layer = 1; layer < plan->layers; layer++) {
        const int in = plan->widths[layer - 1], out = plan->widths[layer];
        float *next = layer + 1 < plan->layers ? current + (ptrdiff_t)in * examples : outputs;
        relu(current, (ptrdiff_t)in * examples);
        fill_rows(next, plan->biases[layer] + client * plan->bias_strides[layer], out, examples);
        plan->sgemm("N", "T", &examples, &out, &in, &one, current, &examples,
                    plan->weights[layer] + client * plan->weight_strides[layer], &out, &one, next, &examples);
        current = next;
    }
}

// inputs, hidden: as in the forward pass
// gradient: [last width][examples], of the outputs; weights and biases take their step
// to_inputs: [parts], like inputs: their gradients
// scratch: [(2 * examples + 1) * largest width]
static void backward(const plan_t *plan, int client, const float *const *inputs, const float *hidden,
                     const float *gradient, float *const *to_inputs, float *scratch) {
    const int examples = plan->examples, first = plan->widths[0];
    const ptrdiff_t half = (ptrdiff_t)examples * plan->largest_width;
    const float one = 1, zero = 0, *outputs = hidden + (ptrdiff_t)plan->hidden_width * examples, *current = gradient;
    float *sums = scratch + 2 * half, *before = scratch;
    for (int layer = plan->layers - 1; layer > 0; layer--) {
        const int in = plan->widths[layer - 1], out = plan->widths[layer];
        const float step = -plan->weight_rates[layer];
        float *weights = plan->weights[layer] + client * plan->weight_strides[layer];
        outputs -= (ptrdiff_t)in * examples;  // those of the layer before
        plan->sgemm("N", "N", &examples, &in, &out, &one, current, &examples, weights, &out, &zero, before, &examples);
        plan->sgemm("T", "N", &out, &in, &examples, &step, current, &examples, outputs, &examples, &one, weights, &out);
        descend_bias(plan->biases[layer] + client * plan->bias_strides[layer], current, sums, out, examples,
                     plan->bias_rates[layer]);
        through_relu(before, outputs, (ptrdiff_t)in * examples);
        current = before;
        before = before == scratch ? scratch + half : scratch;
    }
    const float step = -plan->weight_rates[0];
    float *rows = plan->weights[0] + client * plan->weight_strides[0];
    descend_bias(plan->biases[0] + client * plan->bias_strides[0], current, sums, first, examples, plan->bias_rates[0]);
    for (int part = 0; part < plan->parts; rows += (ptrdiff_t)plan->part_widths[part++] * first) {
        const int *width = &plan->part_widths[part];
        if (plan->part_examples[part] == 1) {
            descend_product(rows, inputs[part], sums, to_inputs[part], *width, first, plan->weight_rates[0]);
            continue;
        }
        plan->sgemm("N", "N", &examples, width, &first, &one, current, &examples, rows, &first, &zero, before, &examples);
        transpose(before, to_inputs[part], *width, examples);
        plan->sgemm("T", "T", &first, width, &examples, &step, current, &examples, inputs[part], width, &one, rows, &first);
    }
}

static ptrdiff_t input_at(const plan_t *plan, int part, int client) {
    return (ptrdiff_t)client * plan->part_examples[part] * plan->part_widths[part];
}

// The forward pass of all clients: [clients][...] each of what `forward` takes, but for scratch
void fedrec_perceptron_forward(const plan_t *plan, const float *const *inputs, float *hidden, float *outputs,
                               float *scratch) {
    const float *own[plan->parts];
    for (int client = 0; client < plan->clients; client++) {
        for (int part = 0; part < plan->parts; part++) own[part] = inputs[part] + input_at(plan, part, client);
        forward(plan, client, own, hidden + (ptrdiff_t)client * plan->hidden_width * plan->examples,
                outputs + (ptrdiff_t)client * plan->widths[plan->layers - 1] * plan->examples, scratch);
    }
}

// The backward pass of all clients, likewise
void fedrec_perceptron_backward(const plan_t *plan, const float *const *inputs, const float *hidden,
                                const float *gradient, float *const *to_inputs, float *scratch) {
    const float *own[plan->parts];
    float *to_own[plan->parts];
    for (int client = 0; client < plan->clients; client++) {
        for (int part = 0; part < plan->parts; part++) {
            own[part] = inputs[part] + input_at(plan, part, client);
            to_own[part] = to_inputs[part] + input_at(plan, part, client);
        }
        backward(plan, client, own, hidden + (ptrdiff_t)client * plan->hidden_width * plan->examples,
                 gradient + (ptrdiff_t)client * plan->widths[plan->layers - 1] * plan->examples, to_own, scratch);
    }
}

// What the sources give in a step of a client; MIXED ones leave the shares that they used
static void prepare(const plan_t *plan, const source_t *sources, int client, const ptrdiff_t *places,
                    const float *const *inputs, float *const *shares) {
    const int examples = plan->examples;
    const float one = 1, zero = 0;
    for (int part = 0; part < plan->parts; part++) {
        const source_t *source = &sources[part];
        if (source->kind == GATHERED) gather((float *)inputs[part], source->values, places, examples, source->width);
        if (source->kind != MIXED) continue;
        gather(shares[part], source->shares, places, examples, source->categories);
        plan->sgemm("N", "N", &source->width, &examples, &source->categories, &one,
                    source->values + client * source->stride, &source->width, shares[part], &source->categories, &zero,
                    (float *)inputs[part], &source->width);
    }
}

// The step of the sources, given the gradients of what they gave
static void descend_sources(const plan_t *plan, const source_t *sources, int client, const ptrdiff_t *places,
                            float *const *gradients, float *const *shares) {
    const int examples = plan->examples;
    const float one = 1;
    for (int part = 0; part < plan->parts; part++) {
        const source_t *source = &sources[part];
        float *own = source->values + client * source->stride;
        const float step = -source->rate;
        if (source->kind == HELD)
            descend_each(own, gradients[part], source->rates + (ptrdiff_t)client * source->width, source->width);
        else if (source->kind == MIXED)
            plan->sgemm("N", "T", &source->width, &source->categories, &examples, &step, gradients[part], &source->width,
                        shares[part], &source->categories, &one, own, &source->width);
        else if (source->rate != 0)
            descend_gathered(source->values, gradients[part], places, examples, source->width, source->rate);
    }
}

// All steps of all clients, for perceptrons of one output and the weighted cross-entropy of their logits.
// hidden: [hidden width][examples]
// scratch: [(2 * examples + 1) * largest width + examples * (1 + 2 * sum of widths + sum of categories)]
void fedrec_train(const plan_t *plan, const source_t *sources, const examples_t *given, float *hidden, float *scratch) {
    const int examples = plan->examples;
    const float *inputs[plan->parts];
    float *gradients[plan->parts], *shares[plan->parts];
    float *gradient = scratch + (2 * examples + 1) * (ptrdiff_t)plan->largest_width, *free = gradient + examples;
    for (int part = 0; part < plan->parts; part++) {
        inputs[part] = free;
        gradients[part] = free += (ptrdiff_t)examples * sources[part].width;
        shares[part] = free += (ptrdiff_t)examples * sources[part].width;
        free += sources[part].kind == MIXED ? (ptrdiff_t)examples * sources[part].categories : 0;
    }
    for (int client = 0; client < plan->clients; client++) {
        for (int part = 0; part < plan->parts; part++)
            if (sources[part].kind == HELD) inputs[part] = sources[part].values + client * sources[part].stride;
        for (int step = 0; step < given->ends[client]; step++) {
            const ptrdiff_t at = (ptrdiff_t)step * given->row + (ptrdiff_t)client * examples, *places = given->places + at;
            float *logits = given->logits + at;
            prepare(plan, sources, client, places, inputs, shares);
            forward(plan, client, inputs, hidden, logits, scratch);
            for (int n = 0; n < examples; n++) {
                if (given->biases) logits[n] += given->biases[places[n]];
                gradient[n] = (1 / (1 + expf(-logits[n])) - given->labels[at + n]) * given->weights[at + n];
            }
            backward(plan, client, inputs, hidden, gradient, gradients, scratch);
            descend_sources(plan, sources, client, places, gradients, shares);
            if (given->biases && given->bias_rate != 0)
                descend_gathered(given->biases, gradient, places, examples, 1, given->bias_rate);
        }
    }
}
